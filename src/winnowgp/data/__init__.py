"""Rows and targets: checked once, standardised, loaded by name."""

from winnowgp.data.catalogue import Table, load_table, table_names
from winnowgp.data.dataset import Dataset
from winnowgp.data.embedded import hills
from winnowgp.data.entries import Entries
from winnowgp.data.minibatches import minibatches
from winnowgp.data.standardise import Standardiser

__all__ = [
    "Dataset",
    "Entries",
    "Standardiser",
    "Table",
    "hills",
    "load_table",
    "minibatches",
    "table_names",
]
