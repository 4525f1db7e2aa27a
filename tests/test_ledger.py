"""The article's ledger: every verdict stands, every mutant is refuted, recordings say the same.

The recordings are one made here, by the code that records on a GPU, and the committed one, which
chapter 10 shows; what its text says of a GPU is held against that.
"""

import json
import re
import shutil
import subprocess
from html import escape as html_text
from pathlib import Path

import pytest
import record
import torch

from pagedlab import checkpoint, ledger, recordings
from pagedlab.kernels.by_token import by_token_kernel
from pagedlab.ledger import cuda
from pagedlab.ledger.claim import VERDICTS, Claim, Refuted, mutant
from pagedlab.ledger.warps import every_order, three_barriers, two_barriers

torch.set_num_threads(1)

ROOT = Path(__file__).parent.parent
COMMITTED = ROOT / "book/recordings/ledger.json"
MUTANTS = [(id, name) for id, claim in ledger.CLAIMS.items() for name in claim.mutants]
GPU_CLAIMS = [id for id, claim in ledger.CLAIMS.items() if claim.gpu_check is not None]
# Subjects whose evidence depends on no size that a GPU's checks choose otherwise.
SAME_ANYWHERE = ("blocks", "table", "life", "reduction")
# What the article states, by the claim that says it; each must be in the ledger.
SUBJECTS = {
    "constants": ["sizes", "constants_twice", "twins"],
    "index arithmetic": ["table_index", "four_places", "byte_address", "num_blocks", "int32"],
    "two index spaces": ["two_index_spaces"],
    "GQA mapping": ["gqa", "shared_reads"],
    "tail block": ["tail_block"],
    "no causal mask": ["no_mask", "new_token"],
    "reduction": ["shuffles", "two_warps", "barriers", "warp_mask"],
    "scale": ["scale"],
    "online softmax": ["online_softmax", "merge"],
    "in-place safety": ["in_place"],
    "block life": ["lifo", "allocation", "release", "reach", "unassigned", "layers_own_blocks"],
    "copy costs": ["copies"],
    "kernel": ["grid", "four_states", "scattered", "rope"],
    "the rest": ["k_then_v", "paging_saves", "real_model"],
}


@pytest.fixture(scope="session")
def own_file(tmp_path_factory):
    """The ledger recorded here: on this CPU, unless there is a GPU, where kernels are compiled."""
    path = tmp_path_factory.mktemp("ledger") / "ledger.json"
    ledger.record(checkpoint.pick_device().type).save(path)
    return path


@pytest.fixture
def answers():
    """The committed recording's evidence by claim."""
    findings = recordings.load(COMMITTED).data["findings"]
    return {id: finding["evidence"] for id, finding in findings.items()}


@pytest.fixture(params=["here", "committed"])
def recording(request, own_file):
    path = own_file if request.param == "here" else COMMITTED
    assert path.stat().st_size < 1_000_000
    return recordings.load(path)


def test_every_claim_is_in_the_ledger_once():
    ids = [id for ids in SUBJECTS.values() for id in ids]
    assert sorted(ids) == sorted(ledger.CLAIMS)


def test_the_points_that_the_article_could_not_try_come_first():
    first = [claim.unverified for claim in ledger.CLAIMS.values()]
    assert first == sorted(first, reverse=True)
    assert list(ledger.CLAIMS)[:4] == ["table_index", "two_warps", "in_place", "copies"]


def test_a_claim_says_what_it_needs_to():
    for claim in ledger.CLAIMS.values():
        assert claim.says.endswith(".")
        assert not claim.found.endswith(".")
        assert claim.check.__doc__
        assert len(claim.mutants) >= 1
    assert {claim.verdict for claim in ledger.CLAIMS.values()} == set(VERDICTS)


def test_a_verdict_is_one_of_four():
    with pytest.raises(ValueError, match=r"^verdict: expected one of holds, .*, got maybe$"):
        Claim("x", "", "", "maybe", "", None, lambda part, device: {}, {})


def test_every_verdict_stands(recording):
    findings = recording.data["findings"]
    assert list(findings) == list(ledger.CLAIMS)
    assert {id: f["problem"] for id, f in findings.items() if not f["stands"]} == {}
    for id, finding in findings.items():
        assert finding["evidence"], id


def test_every_mutant_is_refuted_in_words(recording):
    for id, name in MUTANTS:
        problem = recording.data["findings"][id]["mutants"][name]
        assert problem, f"{id}: {name} passes"
        # refuted by the check, and not because the mutant cannot run
        assert not re.match(r"\w*Error\b", problem), f"{id}, {name}: {problem}"


def test_a_recording_agrees_with_this_machine_where_sizes_do_not_differ(recording, own_file):
    here = json.loads(own_file.read_text())["data"]["findings"]
    compared = 0
    for id, finding in recording.data["findings"].items():
        subject = ledger.CLAIMS[id].check.__module__.rsplit(".")[-1]
        if subject in SAME_ANYWHERE and id != "scale":  # which tries the device's head_dim
            expected = here[id]["evidence"]
            assert {name: finding["evidence"].get(name) for name in expected} == expected, id
            compared += 1
    assert compared >= 15


def test_a_recording_says_which_device_answered(recording):
    assert (recording.data["device"] == "cpu") == ("CPU" in recording.provenance["device"])


def test_the_book_shows_answers_of_a_gpu_with_the_whole_toolkit(answers):
    assert recordings.load(COMMITTED).data["device"] == "cuda"
    for id in GPU_CLAIMS:
        assert not [v for v in answers[id].values() if str(v).startswith(cuda.NOT_RUN)], id


def test_the_gpu_found_the_race_as_the_chapter_tells_it(answers):
    race = answers["barriers"]
    assert race["hazards, 2 barriers"] > 100
    assert re.search(r"\(0 errors, [1-9]\d* warnings?\)$", race["racecheck, 2 barriers"])
    assert race["hazards, 3 barriers"] == 0
    assert race["outputs off by, 2 barriers"] > 0.1  # "far off"
    assert race["outputs off by, 3 barriers"] < 1e-4
    report = race["report"]
    assert race["racecheck, 2 barriers"] in report
    assert {"Write access", "Read access"} == set(re.findall(r"(\w+ access) at", report))
    (in_braces,) = re.findall(r"^\{.*\}$", report, re.MULTILINE)
    assert json.loads(in_braces)["relative_difference"] < 1e-4  # few programs, and right
    source = (cuda.FOLDER / "two_warps.cu").read_text().splitlines()
    named = {source[int(line) - 1].strip() for line in re.findall(r"\.cu:(\d+)", report)}
    assert named == {"sums[0] = sum;", "const float score = sums[0];"}


def test_the_gpu_loses_lanes_and_wraps_as_the_chapter_tells_it(answers, own_file):
    assert answers["two_warps"]["CUDA, 64 threads, off by"] < 1e-5  # "rounding"
    assert answers["two_warps"]["128 threads, off by"] > 0.1  # "a good part of the answer"
    assert answers["two_warps"]["head_dim 128"] == "50%"
    assert answers["in_place"]["runs"] >= 200
    assert answers["int32"]["written, from the cache's start"] == -(2**31)
    assert answers["int32"]["the right byte"] == "untouched"
    here = json.loads(own_file.read_text())["data"]["findings"]
    for id in ("merge", "real_model"):
        assert answers[id] == here[id]["evidence"]
    assert answers["rope"] == pytest.approx(here["rope"]["evidence"], rel=1e-6, abs=1e-12)


def test_copies_cost_the_gpu_what_the_chapter_says(answers):
    copied = answers["copies"]
    assert copied["per_layer, copies recorded"] == 16 * copied["per_step, copies recorded"]
    more = {
        way: copied[f"{way}, us a token"] - copied["no copy, us a token"]
        for way in ("changed_entries", "per_step", "per_layer")
    }
    on_the_wire = copied["bytes a copy"] / 64e9 * 1e6  # us; PCI Express 5.0
    assert more["per_layer"] / 16 > 10 * on_the_wire  # "many times what they would"
    assert more["per_step"] < more["per_layer"] / 5  # "paid once"
    assert more["changed_entries"] < more["per_layer"] / 20  # "next to nothing"


def test_recording_says_what_to_look_at(own_file):
    findings = json.loads(own_file.read_text())["data"]["findings"]
    counts = f"{len(ledger.CLAIMS)} claims, {len(MUTANTS)} mutants"
    assert record.ledger_lines(findings) == [f"{counts}, 0 to look at"]
    findings["lifo"] |= {"stands": False, "problem": "first handed out: [0]"}
    findings["barriers"]["evidence"]["racecheck"] = "not run: no nvcc here"
    findings["release"]["mutants"]["entries stay"] = ""
    assert sorted(record.ledger_lines(findings)) == [
        f"{counts}, 3 to look at",
        "barriers: not run: no nvcc here",
        "lifo: refuted: first handed out: [0]",
        "release: passes with a mistake: entries stay",
    ]


def test_the_ledger_shows_every_claim_with_and_without_a_gpu(recording):
    findings = [ledger.Finding(claim, "cpu", True, {"n": 4096}) for claim in ledger.CLAIMS.values()]
    for gpu in (None, recording):
        table = ledger.Ledger(findings, gpu)
        html, text = table._repr_html_(), repr(table)
        assert "here: CPU</th>" in html
        assert len(table) == len(ledger.CLAIMS)
        assert table.refuted == []
        assert sum(map(len, table.verdicts.values())) == len(table)
        for claim in ledger.CLAIMS.values():
            assert f"<code>{claim.id}</code>" in html
            assert f"{claim.id}: {claim.verdict}. n: 4,096" in text
            assert html_text(claim.check_in_words) in html
        assert (ledger.NO_ANSWER if gpu is None else gpu.describe()) in table.caption
        assert html_text(table.caption) in html
        assert table.caption in text
        assert html.count("</th>") == 3 + (gpu is not None)
        if gpu is not None:
            assert f"recorded: {gpu.provenance['device']}, {gpu.provenance['date'][:10]}<" in html
            assert table.gpu_answer("lifo").endswith("out next: 65,535; mutants refuted: 2 of 2")


def test_what_a_gpu_refuted_is_marked(own_file):
    gpu = recordings.load(own_file)
    gpu.data["findings"]["lifo"] |= {"stands": False, "evidence": {}, "problem": "another block"}
    table = ledger.examine_all(["lifo"], gpu=gpu)
    assert table.gpu_answer("lifo") == "✗ another block"
    assert "✗ another block</td>" in table._repr_html_()
    assert ledger.examine_all(["lifo"]).gpu_answer("lifo") == ledger.NO_ANSWER


def test_what_is_refuted_is_marked():
    finding = ledger.examine("lifo", ledger.CLAIMS["lifo"].mutants["first in, first out"])
    assert not finding
    table = ledger.Ledger([finding])
    assert table.refuted == ["lifo"]
    assert "✗ first handed out: [0, 1, 2]" in table._repr_html_()
    assert "refuted. first handed out" in repr(finding)
    assert "refuted" in finding._repr_html_()


def test_a_part_that_raises_is_refuted_by_that():
    def breaks(seq_len, block_size):
        raise KeyError("no such\nthing")

    assert ledger.examine("allocation", breaks).problem == r"KeyError: 'no such\nthing'"


def test_a_part_of_another_kind_is_not_tried():
    with pytest.raises(ValueError, match=r"^part: expected a function, got 3$"):
        ledger.examine("lifo", 3)
    with pytest.raises(ValueError, match=r"^part: expected a function under @triton.jit, got <bu"):
        ledger.examine("table_index", print)
    with pytest.raises(ValueError, match=r"^part: expected a function, got <triton"):
        ledger.examine("lifo", by_token_kernel)
    with pytest.raises(ValueError, match=r"^part: expected a str, got 3$"):
        ledger.examine("copies", 3)


def test_an_unknown_claim_is_named_in_one_line():
    with pytest.raises(ValueError, match=r"^id: expected one of table_index, .*, got 'nothing'$"):
        ledger.examine("nothing")
    with pytest.raises(ValueError, match=r"^id: expected one of table_index, .*, got \['lifo'\]$"):
        ledger.examine(["lifo"])
    with pytest.raises(ValueError, match=r"^ids: expected a list of ids, got 'lifo'$"):
        ledger.examine_all("lifo")


@pytest.mark.parametrize("device", ["tpu", "cuda:0", 3])
def test_an_unknown_device_is_refused(device):
    with pytest.raises(ValueError, match=rf"^device: expected cpu or cuda, got {device!r}$"):
        ledger.examine("lifo", device=device)
    with pytest.raises(ValueError, match=r"^device: expected cpu or cuda"):
        ledger.examine_all(["lifo"], device=device)


def test_cuda_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ValueError, match=r"^device: expected an NVIDIA GPU for cuda, got a machine"
    ):
        ledger.examine("lifo", device="cuda")


def test_a_part_that_exits_is_refuted():
    finding = ledger.examine("allocation", lambda *_: exit(1), device="cpu")
    assert not finding
    assert finding.problem == "SystemExit: 1"


def test_only_a_ledger_stands_beside_a_ledger():
    with pytest.raises(ValueError, match=r"^gpu: expected a recording of kind ledger, got waste$"):
        ledger.examine_all(["lifo"], gpu=recordings.load("waste"))
    with pytest.raises(ValueError, match=r"^gpu: expected a recording of kind ledger, got 3$"):
        ledger.examine_all(["lifo"], gpu=3)


def test_the_gpus_answers_are_the_books_recording(tmp_path, monkeypatch, own_file):
    assert ledger.on_gpu() == recordings.load(COMMITTED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recordings, "PACKAGE", tmp_path / "pagedlab")
    monkeypatch.setattr(recordings, "_installed", lambda name: [])
    with pytest.raises(recordings.RecordingError, match=r"got 'ledger'$"):
        ledger.on_gpu()
    (tmp_path / "recordings").mkdir()
    shutil.copy(own_file, tmp_path / "recordings/ledger.json")
    assert ledger.on_gpu().kind == "ledger"
    (tmp_path / "recordings/ledger.json").write_text("{}")
    with pytest.raises(recordings.RecordingError, match=r"expected fields"):
        ledger.on_gpu()


def test_a_mutant_changes_one_place_only():
    broken = mutant(by_token_kernel, "q_head // GROUP_SIZE", "q_head % NUM_KV_HEADS")
    assert broken is not by_token_kernel
    with pytest.raises(ValueError, match=r"^before: expected text found once, got 'q_head' \d+x$"):
        mutant(by_token_kernel, "q_head", "kv_head")
    with pytest.raises(ValueError, match=r"^before: .* 0x$"):
        mutant(by_token_kernel, "no such text", "")
    with pytest.raises(ValueError, match=r"^kernel: expected a function under @triton.jit"):
        mutant(print, "a", "b")
    with pytest.raises(ValueError, match=r"^after: expected another text than before, got 'GRO"):
        mutant(by_token_kernel, "GROUP_SIZE: tl", "GROUP_SIZE: tl")
    with pytest.raises(ValueError, match=r"^after: expected text, got 3$"):
        mutant(by_token_kernel, "GROUP_SIZE: tl", 3)
    with pytest.raises(ValueError, match=r"^after: expected Python, got '\(' \("):
        mutant(by_token_kernel, "q_head // GROUP_SIZE", "(")
    with pytest.raises(ValueError, match=r"^before: .* 0x$"):
        mutant(by_token_kernel, "@triton", "@nothing")  # it would change nothing that runs


def test_two_warps_race_with_two_barriers_and_not_with_three():
    sums, right = ([1.0, 2.0, 3.0], [10.0, 20.0, 30.0]), [11.0, 22.0, 33.0]
    racing = every_order(two_barriers, sums)
    scores = {(tuple(a), tuple(b)) for a, b in (order.scores for order in racing)}
    assert (tuple(right), tuple(right)) in scores
    assert ((11.0, 22.0, 33.0), (2.0, 22.0, 33.0)) in scores  # warp 1 reads warp 0's next sum
    assert all(a == tuple(right) for a, _ in scores)  # only the slow warp is wrong
    assert all(order.scores == (right, right) for order in every_order(three_barriers, sums))


def test_a_warp_that_waits_forever_is_found():
    def uneven(warp, sums, shared, scores):
        yield "moved"
        if warp == 0:
            yield "barrier"

    with pytest.raises(RuntimeError, match=r"^warps: expected both at the barrier"):
        every_order(uneven, ([1.0], [1.0]))


REPORT = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at two_warps+0x1c0 in /a/b/two_warps.cu:35
=========     and Read access at two_warps+0x2d0 in /a/b/two_warps.cu:44 [1008 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
CLEAN = "========= COMPUTE-SANITIZER\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors)\n"


def test_racecheck_reports_are_read():
    found = cuda.parse_racecheck(REPORT)
    assert found.found == 1008
    assert found.summary == "1 hazard displayed (1 error, 0 warnings)"
    assert "in two_warps.cu:35" in found.text
    assert "/a/" not in found.text
    assert cuda.parse_racecheck(CLEAN).found == 0
    assert cuda.parse_racecheck(REPORT.replace(" [1008 hazards]", "")).found == 1
    with pytest.raises(RuntimeError, match=r"^racecheck: expected a summary, got 'Killed'$"):
        cuda.parse_racecheck("Killed\n")


@pytest.mark.skipif(cuda.find_tool("nvcc") is None, reason="no nvcc here")
@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
def test_two_warps_compiles_and_has_one_barrier_more_where_it_says(tmp_path, arch):
    program = cuda.build("two_warps", tmp_path, arch)
    ptx = tmp_path / "two_warps.ptx"
    command = [
        cuda.find_tool("nvcc"),
        f"-arch={arch}",
        "-ptx",
        "-o",
        ptx,
        cuda.FOLDER / "two_warps.cu",
    ]
    subprocess.run(command, check=True)
    entries = ptx.read_text().split(".visible .entry ")[1:]
    barriers = {}
    for entry in entries:
        head_dim, count = re.findall(r"Li(\d+)E", entry)[:2]
        loop = entry.count("shfl.sync.down")
        assert loop % 5 == 0
        barriers[head_dim, count] = entry.count("bar.sync") * 5 // loop
    assert barriers == {("64", "2"): 2, ("64", "3"): 3, ("128", "3"): 3}
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match=r"^two_warps: two_warps: "):
            cuda.run(program, 64, 2, 10, 1)


def test_arguments_that_two_warps_does_not_take_are_refused(tmp_path):
    if cuda.find_tool("nvcc") is None:
        pytest.skip("no nvcc here")
    program = cuda.build("two_warps", tmp_path, "sm_90")
    for arguments in ((64, 2), (32, 2, 10, 1)):
        with pytest.raises(RuntimeError, match=r"two_warps: expected"):
            cuda.run(program, *arguments)


def test_missing_tools_are_named(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name, path: None)
    assert cuda.missing_tools("nvcc", "compute-sanitizer") == (
        "not run: no nvcc and no compute-sanitizer here"
    )
    monkeypatch.setattr(shutil, "which", lambda name, path: "/usr/bin/" + name)
    assert cuda.missing_tools("nvcc") == ""


def test_a_refutation_needs_a_reason():
    with pytest.raises(Refuted, match=r"^three of four$"):
        ledger.claims.refute_unless(3 == 4, "three of four")


@pytest.mark.gpu
def test_every_verdict_stands_on_a_gpu():
    assert ledger.examine_all(device="cuda").refuted == []
