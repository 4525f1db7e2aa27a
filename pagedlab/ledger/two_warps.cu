// One score at a time with two warps, as the article describes it, to be watched on a GPU.
// A program per query head; HEAD_DIM threads, one per lane; K and V are contiguous here.
//
//   nvcc -arch=native -lineinfo -o two_warps two_warps.cu
//   two_warps HEAD_DIM BARRIERS NUM_TOKENS NUM_PROGRAMS    HEAD_DIM 64 or 128, BARRIERS 2 or 3
//
// Prints one line of JSON: the largest difference from the same sums in double on the CPU,
// relative to the largest output.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int LANES_PER_WARP = 32;

template <int HEAD_DIM, int BARRIERS>
__global__ void two_warps(const float *q, const float *k, const float *v, int num_tokens,
                          float *out)
{
    __shared__ float sums[2];  // the article's two places, whatever HEAD_DIM is
    const int lane = threadIdx.x;
    const float my_q = q[blockIdx.x * HEAD_DIM + lane];
    float running_max = -INFINITY, d = 0.0f, acc = 0.0f;

    for (int token = 0; token < num_tokens; ++token) {
        float sum = my_q * k[token * HEAD_DIM + lane];
        for (int apart = LANES_PER_WARP / 2; apart > 0; apart /= 2)
            sum += __shfl_down_sync(ALL_LANES, sum, apart);
        if (lane == 0)
            sums[0] = sum;
        if (lane == LANES_PER_WARP)
            sums[1] = sum;
        __syncthreads();
        if (lane == 0)
            sums[0] = (sums[0] + sums[1]) / 8.0f;  // the article's fixed root of 64
        __syncthreads();
        const float score = sums[0];
        if (BARRIERS == 3)
            __syncthreads();  // all have read the score before the next token's sum replaces it

        const float new_max = fmaxf(running_max, score);
        const float correction = expf(running_max - new_max);
        const float weight = expf(score - new_max);
        d = d * correction + weight;
        acc = acc * correction + weight * v[token * HEAD_DIM + lane];
        running_max = new_max;
    }
    out[blockIdx.x * HEAD_DIM + lane] = acc / d;
}

void expect(cudaError_t status)
{
    if (status != cudaSuccess) {
        std::fprintf(stderr, "two_warps: %s\n", cudaGetErrorString(status));
        std::exit(1);
    }
}

float *on_device(const std::vector<float> &values)
{
    float *copy;
    expect(cudaMalloc(&copy, values.size() * sizeof(float)));
    expect(cudaMemcpy(copy, values.data(), values.size() * sizeof(float), cudaMemcpyHostToDevice));
    return copy;
}

std::vector<float> random_values(size_t size)
{
    static unsigned state = 1;
    std::vector<float> values(size);
    for (float &value : values) {
        state = state * 1664525u + 1013904223u;
        value = (state >> 8) / 8388608.0f - 1.0f;  // -1 to 1
    }
    return values;
}

// The softmax-weighted mean with all lanes' products and the root of HEAD_DIM.
std::vector<double> expected(const std::vector<float> &q, const std::vector<float> &k,
                             const std::vector<float> &v, int head_dim, int num_tokens)
{
    std::vector<double> out(q.size());
    for (size_t program = 0; program < q.size() / head_dim; ++program) {
        std::vector<double> scores(num_tokens, 0.0);
        double largest = -INFINITY, total = 0.0;
        for (int token = 0; token < num_tokens; ++token) {
            for (int lane = 0; lane < head_dim; ++lane)
                scores[token] += double(q[program * head_dim + lane]) * k[token * head_dim + lane];
            scores[token] /= std::sqrt(double(head_dim));
            largest = std::fmax(largest, scores[token]);
        }
        for (double &score : scores)
            total += score = std::exp(score - largest);
        for (int token = 0; token < num_tokens; ++token)
            for (int lane = 0; lane < head_dim; ++lane)
                out[program * head_dim + lane] +=
                    scores[token] / total * v[token * head_dim + lane];
    }
    return out;
}

template <int HEAD_DIM, int BARRIERS>
void run(int num_tokens, int num_programs)
{
    const auto q = random_values(size_t(num_programs) * HEAD_DIM);
    const auto k = random_values(size_t(num_tokens) * HEAD_DIM);
    const auto v = random_values(size_t(num_tokens) * HEAD_DIM);
    std::vector<float> out(q.size());
    float *q_gpu = on_device(q), *k_gpu = on_device(k), *v_gpu = on_device(v);
    float *out_gpu = on_device(out);

    two_warps<HEAD_DIM, BARRIERS>
        <<<num_programs, HEAD_DIM>>>(q_gpu, k_gpu, v_gpu, num_tokens, out_gpu);
    expect(cudaGetLastError());
    expect(cudaDeviceSynchronize());
    expect(cudaMemcpy(out.data(), out_gpu, out.size() * sizeof(float), cudaMemcpyDeviceToHost));

    double difference = 0.0, largest = 0.0;
    const auto right = expected(q, k, v, HEAD_DIM, num_tokens);
    for (size_t i = 0; i < out.size(); ++i) {
        largest = std::fmax(largest, std::fabs(right[i]));
        const double error = std::fabs(out[i] - right[i]);
        difference = error > difference || std::isnan(error) ? error : difference;
    }
    std::printf("{\"head_dim\": %d, \"barriers\": %d, \"relative_difference\": %.3e}\n", HEAD_DIM,
                BARRIERS, difference / largest);
    for (float *memory : {q_gpu, k_gpu, v_gpu, out_gpu})
        expect(cudaFree(memory));
}

int main(int argc, char **argv)
{
    if (argc != 5) {
        std::fprintf(stderr, "two_warps: expected HEAD_DIM BARRIERS NUM_TOKENS NUM_PROGRAMS\n");
        return 2;
    }
    const int head_dim = std::atoi(argv[1]), barriers = std::atoi(argv[2]);
    const int num_tokens = std::atoi(argv[3]), num_programs = std::atoi(argv[4]);
    if (head_dim == 64 && barriers == 2)
        run<64, 2>(num_tokens, num_programs);
    else if (head_dim == 64 && barriers == 3)
        run<64, 3>(num_tokens, num_programs);
    else if (head_dim == 128 && barriers == 3)
        run<128, 3>(num_tokens, num_programs);
    else {
        std::fprintf(stderr, "two_warps: expected 64 2, 64 3 or 128 3, got %d %d\n", head_dim,
                     barriers);
        return 2;
    }
    return 0;
}
