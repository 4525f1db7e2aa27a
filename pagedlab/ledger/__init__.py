"""The article's ledger: each of its claims, with the check that proves or corrects it (chapter 10).

`CLAIMS` holds them by id, first those that the article says it could not try. A file of this folder
holds the claims of one subject; `two_warps.cu` is what only CUDA C++ can show.
"""

from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import Any

import torch

from pagedlab import checkpoint, recordings
from pagedlab.layout import expect
from pagedlab.ledger import (
    addresses,
    blocks,
    copies,
    kernel,
    life,
    model,
    reduction,
    softmax,
    table,
)
from pagedlab.ledger import claim as claims
from pagedlab.ledger.claim import Claim, Finding, mutant
from pagedlab.recordings import Recording

__all__ = ["CLAIMS", "Claim", "Finding", "Ledger", "examine", "examine_all", "mutant", "on_gpu"]

_OPEN = ("table_index", "two_warps", "in_place", "copies", "real_model")  # in the article's order
_FILES = (blocks, table, kernel, addresses, reduction, softmax, model, life, copies)
_BY_ID = {claim.id: claim for file in _FILES for claim in file.CLAIMS}
CLAIMS: Mapping[str, Claim] = {id: _BY_ID[id] for id in (*_OPEN, *_BY_ID)}

COLOURS = {
    "holds": "#009e73",
    "holds only when": "#e69f00",
    "wrong": "#d55e00",
    "silent": "#0072b2",
}
CELL = "text-align:left;vertical-align:top;padding:.4em .6em;border-top:1px solid #80808055"
NO_ANSWER = "No GPU's answer stands beside it."


def examine(id: str, part: Any = None, *, device: str | None = None) -> Finding:
    """Run one claim's check, on its own part or on yours.

    Args:
        id: a key of CLAIMS.
        part: what to try in place of the claim's part; `CLAIMS[id].part` shows what it must look
            like. One that raises is refuted by that.
        device: "cpu" or "cuda"; by default "cuda" where an NVIDIA GPU is.

    Returns:
        Finding: true if the verdict stands; shows itself as one line.

    Raises:
        ValueError: no claim has this id, or the part is of another kind than the claim's.

    >>> examine("lifo")
    lifo on cpu: stands. first block out: 65,535; released last, out next: 65,535
    >>> examine("allocation", lambda seq_len, block_size: seq_len % block_size == 0).stands
    False
    """
    if not isinstance(id, str) or id not in CLAIMS:
        raise ValueError(f"id: expected one of {', '.join(CLAIMS)}, got {id!r}")
    return claims.examine(CLAIMS[id], part, _device(device))


class Ledger:
    """Findings as a table, and beside each, if there is a recording, what a GPU answered.

    Args:
        findings: what was found here.
        gpu: a recording of kind "ledger", or None.

    Raises:
        ValueError: another `gpu`.
    """

    def __init__(self, findings: Iterable[Finding], gpu: Recording | None = None) -> None:
        kind = getattr(gpu, "kind", repr(gpu))
        expect(gpu is None or kind == "ledger", "gpu", "a recording of kind ledger", kind)
        self.findings = {finding.claim.id: finding for finding in findings}
        self.gpu = gpu

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings.values())

    def __len__(self) -> int:
        return len(self.findings)

    @property
    def refuted(self) -> list[str]:
        """Ids of the claims whose verdict does not stand."""
        return [finding.claim.id for finding in self if not finding.stands]

    @property
    def verdicts(self) -> dict[str, list[str]]:
        """Ids by verdict."""
        return {
            verdict: [f.claim.id for f in self if f.claim.verdict == verdict]
            for verdict in claims.VERDICTS
        }

    def gpu_answer(self, id: str) -> str:
        """What the recording says of a claim: its evidence, and how its mutants fared."""
        if self.gpu is None:
            return NO_ANSWER
        recorded = self.gpu.data["findings"][id]
        if not recorded["stands"]:
            return f"✗ {recorded['problem']}"
        evidence = {k: v for k, v in recorded["evidence"].items() if k != "report"}
        refuted = list(map(bool, recorded["mutants"].values()))
        counted = f"mutants refuted: {sum(refuted)} of {len(refuted)}"
        return f"{claims.show_evidence(evidence)}; {counted}"

    def __repr__(self) -> str:
        lines = []
        for f in self:
            lines.append(f"{f.claim.id}: {f.claim.verdict}. {f.shown}")
            if self.gpu is not None:
                lines.append(f"    {self.gpu.provenance['device']}: {self.gpu_answer(f.claim.id)}")
        return "\n".join([*lines, self.caption])

    @property
    def caption(self) -> str:
        """Where the findings were made, and where a GPU's answers come from."""
        return f"Here: {self._here}. {NO_ANSWER if self.gpu is None else self.gpu.describe()}"

    @property
    def _here(self) -> str:
        return ", ".join(sorted({_device_name(finding.device) for finding in self}))

    def _repr_html_(self) -> str:
        heads = ["the article says, and the check", "verdict", f"here: {self._here}"]
        if self.gpu is not None:
            of = self.gpu.provenance
            heads.append(f"recorded: {of['device']}, {of['date'][:10]}")
        rows = "".join(self._row(finding) for finding in self)
        head = "".join(f'<th style="{CELL}">{escape(name)}</th>' for name in heads)
        return (
            '<div class="pagedlab-ledger" tabindex="0" style="overflow-x:auto">'
            f'<table style="min-width:{11 * len(heads)}em;font-size:.875em">'
            f"<caption>{escape(self.caption)}</caption><thead><tr>{head}</tr></thead>"
            f"<tbody>{rows}</tbody></table></div>"
        )

    def _row(self, finding: Finding) -> str:
        claim, cell = finding.claim, f'<td style="{CELL};{{}}">{{}}</td>'
        verdict = f"<b>{claim.verdict}</b><br>{escape(claim.found)}"
        says = (
            f"<code>{claim.id}</code> ({escape(claim.where)})<br>{escape(claim.says)}"
            f"<br><i>Check:</i> {escape(claim.check_in_words)}"
        )
        shown = ("" if finding else "✗ ") + escape(finding.shown)
        border = f"border-left:4px solid {COLOURS[claim.verdict]};padding-left:.8em"
        texts = [("", says), (border, verdict), ("", shown)]
        if self.gpu is not None:
            texts.append(("", escape(self.gpu_answer(claim.id))))
        return f"<tr>{''.join(cell.format(*text) for text in texts)}</tr>"


def _device(name: str | None) -> str:
    """The device to examine on; ValueError if it is neither "cpu" nor "cuda", or not there."""
    if name is None:
        return checkpoint.pick_device().type
    expect(name in ("cpu", "cuda"), "device", "cpu or cuda", repr(name))
    there = name == "cpu" or torch.cuda.is_available()
    expect(there, "device", "an NVIDIA GPU for cuda", "a machine without one")
    return name


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else device.upper()


def examine_all(
    ids: Iterable[str] = CLAIMS, *, device: str | None = None, gpu: Recording | None = None
) -> Ledger:
    """Run the checks of some claims, all by default, and set a GPU's answers beside them.

    Raises:
        ValueError: an id that no claim has, one id where a list belongs, or another `gpu`.
    """
    expect(not isinstance(ids, str), "ids", "a list of ids", repr(ids))
    return Ledger((examine(id, device=device) for id in ids), gpu)


def record(device: str) -> Recording:
    """Every claim examined on a device, and each of its mutants, as a recording."""
    findings = {}
    for id, claim in CLAIMS.items():
        finding = examine(id, device=device).to_json()
        problems = {
            name: examine(id, claim.mutants[name], device=device).problem for name in claim.mutants
        }
        findings[id] = finding | {"mutants": problems}
    return Recording("ledger", {"device": device, "findings": findings})


def on_gpu() -> Recording:
    """The recording of every claim and every mutant examined on a GPU.

    Raises:
        RecordingError: it is missing or damaged.
    """
    return recordings.load("ledger")
