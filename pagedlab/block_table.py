"""Which physical block holds a logical block, and the copy of that on the device (chapter 2)."""

from collections.abc import Sequence

import numpy as np
import torch

from pagedlab.layout import expect_in_range

UNASSIGNED = -1
SYNC_POLICIES = ("changed_entries", "per_step", "per_layer")
STAGED_ENTRIES = 4096  # entries that one pinned staging buffer carries


class BlockTable:
    """Physical blocks by [slot, layer, logical block], -1 where unassigned.

    `host` is the int32 numpy array [num_slots, num_layers, max_blocks_per_seq], read-only outside
    this class; `device` is the tensor that kernels read, and it never moves. On a CPU both share
    the same memory.

    Args:
        num_slots: sequences that can be alive at the same time.
        num_layers: decoder layers; each has a row of its own per slot.
        max_blocks_per_seq: logical blocks per row.
        device: where `device` lives.
        sync: how `sync()` brings changes to the device: "per_layer" copies the whole table at every
            layer (tiny-vllm), "per_step" copies it once a step, "changed_entries" sends only the
            entries that changed.
        shared: whether `device` is `host`'s memory; by default on a CPU only.

    Raises:
        ValueError: a size below 1, an unknown policy, shared memory on a GPU.

    Source: the tiny-vllm article, section on the block table, and its question of what copies cost.

    >>> table = BlockTable(num_slots=2, num_layers=3, max_blocks_per_seq=4)
    >>> table.assign(slot=1, layer=0, logical_block=2, physical_block=7)
    >>> table.lookup(1, 0, 2), table.lookup(1, 0, 3)
    (7, -1)
    >>> table.release_slot(1)
    [7]
    """

    @torch.inference_mode(False)  # sync() writes into the tensors in any mode
    def __init__(
        self,
        num_slots: int,
        num_layers: int,
        max_blocks_per_seq: int,
        device: torch.device | str = "cpu",
        *,
        sync: str = "changed_entries",
        shared: bool | None = None,
    ) -> None:
        self.num_slots = expect_in_range("num_slots", num_slots, start=1)
        self.num_layers = expect_in_range("num_layers", num_layers, start=1)
        self.max_blocks_per_seq = expect_in_range("max_blocks_per_seq", max_blocks_per_seq, start=1)
        if sync not in SYNC_POLICIES:
            raise ValueError(f"sync: expected one of {', '.join(SYNC_POLICIES)}, got {sync!r}")
        on_cpu = torch.device(device).type == "cpu"
        if shared and not on_cpu:
            raise ValueError(f"shared: expected a CPU table, got device {device}")
        shape = (self.num_slots, self.num_layers, self.max_blocks_per_seq)
        self._host = np.full(shape, UNASSIGNED, np.int32)
        self.host = self._host.view()
        self.host.flags.writeable = False
        self._host_tensor = torch.from_numpy(self._host)
        self.shared = on_cpu if shared is None else shared
        self.device = self._host_tensor if self.shared else self._host_tensor.to(device, copy=True)
        self.sync_policy = sync
        self.bytes_copied = 0  # by sync(), host to device
        self._changed: set[int] = set()  # flat indices of entries the device has not seen
        self._staging = [Staging(self.device) for _ in range(0 if self.shared else 2)]

    def assign(self, slot: int, layer: int, logical_block: int, physical_block: int) -> None:
        """Enter a physical block at an unassigned place.

        Raises:
            ValueError: an index outside the table, a negative block, or an entry already assigned
                (overwriting it would lose its block).
        """
        slot, layer, logical_block = self._place(slot, layer, logical_block)
        physical_block = expect_in_range("physical_block", physical_block, 2**31)
        self._enter(slot, slice(layer, layer + 1), logical_block, [physical_block])

    def assign_layers(self, slot: int, logical_block: int, blocks: Sequence[int]) -> None:
        """Enter one physical block per layer, blocks[layer], at one logical block: all or none.

        Raises:
            ValueError: as assign, or a number of blocks other than num_layers.
        """
        slot, _, logical_block = self._place(slot, 0, logical_block)
        try:
            blocks = [expect_in_range("physical_block", block, 2**31) for block in blocks]
        except TypeError:
            raise ValueError(f"blocks: expected one per layer, got {blocks!r}") from None
        if len(blocks) != self.num_layers:
            raise ValueError(
                f"blocks: expected one per layer ({self.num_layers}), got {len(blocks)}"
            )
        self._enter(slot, slice(0, self.num_layers), logical_block, blocks)

    def lookup(self, slot: int, layer: int, logical_block: int) -> int:
        """The physical block of a logical block, -1 if unassigned."""
        return int(self._host[self._place(slot, layer, logical_block)])

    def release_slot(self, slot: int) -> list[int]:
        """Take every block out of a slot and return them, layer by layer, in logical order."""
        slot = expect_in_range("slot", slot, self.num_slots)
        assigned = np.flatnonzero(self._host[slot] != UNASSIGNED)
        blocks = self._host[slot].reshape(-1)[assigned].tolist()
        self._host[slot] = UNASSIGNED
        self._mark(slot * self.num_layers * self.max_blocks_per_seq + assigned)
        return blocks

    def sync(self, layer: int | None = None) -> int:
        """Bring the device copy up to date, as the policy says; returns the bytes copied.

        Attention calls it with its layer before each kernel, an engine without one before a step.
        """
        if self.shared:
            return 0
        if self.sync_policy == "changed_entries":
            copied = self._send_changed_entries()
        elif self.sync_policy == "per_layer" or self._changed or layer in (None, 0):
            self.device.copy_(self._host_tensor)
            copied = self._host.nbytes
        else:
            copied = 0
        self._changed.clear()
        self.bytes_copied += copied
        return copied

    def __getstate__(self) -> tuple:
        return self.device.device, self.sync_policy, self.shared, self.host

    def __setstate__(self, state: tuple) -> None:
        """A copied or unpickled table: its host and device belong together like the original's."""
        device, sync, shared, host = state
        self.__init__(*host.shape, device, sync=sync, shared=shared)  # type: ignore[misc]
        self._host[:] = host
        self._mark(np.arange(host.size))

    def _place(self, slot: int, layer: int, logical_block: int) -> tuple[int, int, int]:
        """Three indices, checked, as Python ints."""
        return (
            expect_in_range("slot", slot, self.num_slots),
            expect_in_range("layer", layer, self.num_layers),
            expect_in_range("logical_block", logical_block, self.max_blocks_per_seq),
        )

    def _enter(self, slot: int, layers: slice, logical_block: int, blocks: Sequence[int]) -> None:
        entries = self._host[slot, layers, logical_block]
        for layer, owner in enumerate(entries.tolist(), start=layers.start):
            if owner != UNASSIGNED:
                raise ValueError(
                    f"block_table[{slot}, {layer}, {logical_block}]: expected unassigned (-1),"
                    f" got {owner}"
                )
        entries[:] = blocks
        rows = slot * self.num_layers + np.arange(layers.start, layers.stop)
        self._mark(rows * self.max_blocks_per_seq + logical_block)

    def _mark(self, flat_indices: np.ndarray) -> None:
        if not self.shared:
            self._changed.update(flat_indices.tolist())

    def _send_changed_entries(self) -> int:
        changed = np.fromiter(sorted(self._changed), np.int64, len(self._changed))
        copied = 0
        for start in range(0, len(changed), STAGED_ENTRIES):
            indices = changed[start : start + STAGED_ENTRIES]
            self._staging.reverse()  # two buffers take turns: one is filled while the other travels
            copied += self._staging[0].send(indices, self._host.reshape(-1)[indices], self.device)
        return copied


class Staging:
    """A host buffer for changed entries, (flat index, physical block) pairs, on their way."""

    def __init__(self, device_table: torch.Tensor) -> None:
        self.on_cuda = device_table.is_cuda
        self.pairs = torch.empty(2, STAGED_ENTRIES, dtype=torch.int64, pin_memory=self.on_cuda)
        self.arrived = torch.cuda.Event() if self.on_cuda else None

    def send(self, indices: np.ndarray, blocks: np.ndarray, device_table: torch.Tensor) -> int:
        """Copy the pairs and write them into the table, in stream order; returns bytes copied."""
        if self.arrived is not None:
            self.arrived.synchronize()  # its previous load has left the buffer
        pairs = self.pairs.view(-1)[: 2 * len(indices)].view(2, -1)
        pairs.numpy()[:] = indices, blocks
        on_device = pairs.to(device_table.device, non_blocking=True)
        if self.arrived is not None:
            self.arrived.record()
        device_table.view(-1).scatter_(0, on_device[0], on_device[1].to(torch.int32))
        return pairs.nbytes
