"""The book's widgets: each is one object on a static page, in JupyterLab and in Colab."""

from pagedlab.widgets.address import AddressCalculator
from pagedlab.widgets.blocks import BlockTableView
from pagedlab.widgets.charts import Chart
from pagedlab.widgets.decode import DecodeExplorer
from pagedlab.widgets.kernel_stepper import KernelStepper
from pagedlab.widgets.timeline import RecyclingTimeline

__all__ = [
    "AddressCalculator",
    "BlockTableView",
    "Chart",
    "DecodeExplorer",
    "KernelStepper",
    "RecyclingTimeline",
]
