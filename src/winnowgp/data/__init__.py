"""Rows and targets: checked once, standardised, loaded by name, read some rows at a time."""

from winnowgp.data.array_source import ArraySource
from winnowgp.data.batch_source import BatchSource
from winnowgp.data.catalogue import Table, load_table, table_names
from winnowgp.data.column_blocks import column_blocks
from winnowgp.data.column_encoding import ColumnEncoding
from winnowgp.data.column_moments import ColumnMoments
from winnowgp.data.columns import Columns
from winnowgp.data.dataset import Dataset
from winnowgp.data.embedded import hills
from winnowgp.data.entries import Entries
from winnowgp.data.parquet_source import ParquetSource
from winnowgp.data.ranks import Ranks
from winnowgp.data.read_columns import read_columns
from winnowgp.data.regrouped import regrouped
from winnowgp.data.row_batches import RowBatches
from winnowgp.data.row_numbers import sampled_rows
from winnowgp.data.shared_source import SharedSource, shared
from winnowgp.data.source import Source
from winnowgp.data.standardise import Standardiser
from winnowgp.data.standardised import StandardisedSource, standardised
from winnowgp.data.table_encoder import TableEncoder

__all__ = [
    "ArraySource",
    "BatchSource",
    "ColumnEncoding",
    "ColumnMoments",
    "Columns",
    "Dataset",
    "Entries",
    "ParquetSource",
    "Ranks",
    "RowBatches",
    "SharedSource",
    "Source",
    "StandardisedSource",
    "Standardiser",
    "Table",
    "TableEncoder",
    "column_blocks",
    "hills",
    "load_table",
    "read_columns",
    "regrouped",
    "sampled_rows",
    "shared",
    "standardised",
    "table_names",
]
