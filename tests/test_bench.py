"""The CPU benchmark: it runs, its contestants agree, and the engine alone stays small."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "engine_cpu.py"


@pytest.mark.serial
def test_the_benchmark_compares_equal_texts_and_the_engine_peaks_below_1_5_gb(tmp_path):
    pytest.importorskip("transformers")
    out = tmp_path / "engine.json"
    command = [sys.executable, SCRIPT, "--tokens", "8", "--rounds", "1", "--out", out]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = json.loads(out.read_text())
    measured = {(row["name"], row["batch"]) for row in rows}
    assert measured == {(name, n) for name in ("pagedlab", "transformers") for n in (1, 4)}
    assert all(row["tokens_per_s"] > 0 for row in rows)
    assert 0.5e9 < rows[0]["engine_peak_bytes"] < 1.5e9
    assert "peak memory of the engine alone" in run.stdout
