"""BlockTableView: the block table of a layer, the physical blocks and the free list."""

from collections.abc import Iterable, Sequence

import traitlets

from pagedlab.block_pool import BlockPool
from pagedlab.block_table import BlockTable
from pagedlab.run_recorder import table_size
from pagedlab.widgets.base import Panel, View, complain, css, esm, slider


class TableView(View):
    """What BlockTableView draws; its integer traits are the state."""

    _esm = esm("BlockTableView", "panes", "blocks")
    _css = css("panes")
    table = traitlets.Bytes(b"").tag(sync=True)
    layer = traitlets.Int(0).tag(sync=True)
    slot = traitlets.Int(0).tag(sync=True)
    logical_block = traitlets.Int(0).tag(sync=True)


class BlockTableView(Panel):
    """The table of a chosen layer for all slots; pointing at an entry lights its block everywhere.

    Slot 0 is sequence A, slot 1 is B, and so on.

    Args:
        table: the block table, as it stands now.
        pool: the pool its blocks come from; without it the free list is left out.
        titles: what each slot holds, e.g. the prompt's first words.
        name: prefix in permalinks, when a page has several.
        predict: start with the chosen entry hidden.
        **state: where to start: layer, slot, logical_block.

    >>> from pagedlab import BlockPool, BlockTable
    >>> pool, table = BlockPool(8), BlockTable(num_slots=2, num_layers=1, max_blocks_per_seq=4)
    >>> table.assign(0, 0, 0, *pool.allocate(1))
    >>> BlockTableView(table, pool).view.data["free"]
    [[0, 7]]
    """

    def __init__(
        self,
        table: BlockTable,
        pool: BlockPool | None = None,
        *,
        titles: Sequence[str] | None = None,
        name: str = "table",
        predict: bool = False,
        **state: int,
    ) -> None:
        num_blocks = pool.num_blocks if pool else max(1, int(table.host.max()) + 1)
        size = table_size(table, num_blocks)
        stops = {
            "layer": table.num_layers,
            "slot": table.num_slots,
            "logical_block": table.max_blocks_per_seq,
        }
        for key, value in state.items():
            if key not in stops or not 0 <= value < stops[key]:
                expected = f"0 <= {key} < {stops[key]}" if key in stops else ", ".join(stops)
                super().__init__(complain(f"{key}: expected {expected}, got {value}"))
                return
        view = TableView(
            data={
                "title": "block table",
                "size": size,
                "free": runs(pool.free_blocks) if pool else None,
                "titles": list(titles) if titles else None,
            },
            table=table.host.tobytes(),
            name=name,
            predict=predict,
            **state,
        )
        controls = {"layer": slider(view, "layer", table.num_layers, "layer", wide=True)}
        super().__init__(view, controls if table.num_layers > 1 else None)


def runs(blocks: Iterable[int]) -> list[list[int]]:
    """Ascending runs as [first, count]: a free list of 65,536 blocks in a few numbers.

    >>> runs([0, 1, 2, 9, 4, 5])
    [[0, 3], [9, 1], [4, 2]]
    """
    found: list[list[int]] = []
    for block in blocks:
        if found and block == sum(found[-1]):
            found[-1][1] += 1
        else:
            found.append([int(block), 1])
    return found
