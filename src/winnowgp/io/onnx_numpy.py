"""Export of programs to ONNX and to a Python file that needs only NumPy."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from winnowgp import __version__
from winnowgp.errors import InputError, MissingExtraError
from winnowgp.io.format import atomic_write
from winnowgp.io.program import Program, Step

OPSET, ML_OPSET, IR_VERSION = 18, 3, 9

_AXES = {-1: "winnowgp/last", 1: "winnowgp/second"}

_SAME = (
    "Add",
    "Sub",
    "Mul",
    "Div",
    "MatMul",
    "Exp",
    "Sqrt",
    "Sin",
    "Pow",
    "Max",
    "Softplus",
    "Sigmoid",
)


def save_onnx(program: Program, path: Path) -> Path:
    """Write a program as an ONNX model in float64, which onnx checks first."""
    try:
        import onnx
        from onnx import TensorProto, helper, numpy_helper
    except ImportError:
        raise MissingExtraError(
            "export to ONNX needs the package onnx: pip install 'winnowgp[onnx]'. Export to NumPy "
            "needs no other package."
        ) from None
    taken = {given.name for given in program.inputs} & set(program.outputs)
    if taken:
        raise InputError(
            f"columns must not have the name of an output in ONNX; got {', '.join(taken)}; rename "
            "the column."
        )
    # The prefix keeps names of intermediate values apart from names of columns.
    own = [*program.constants, *(step.output for step in program.steps)]
    values = {name: f"winnowgp/{name}" for name in own}
    values |= {f"input{i}": given.name for i, given in enumerate(program.inputs)}
    inputs = [
        helper.make_tensor_value_info(
            given.name,
            TensorProto.STRING if given.kind == "category" else TensorProto.DOUBLE,
            ["N"] if given.width is None else ["N", given.width],
        )
        for given in program.inputs
    ]
    nodes = [node for step in program.steps for node in _nodes(helper, step, program, values)]
    outputs = []
    for name, (value, width) in program.outputs.items():
        nodes.append(helper.make_node("Identity", [values[value]], [name]))
        shape = ["N"] if width is None else ["N", width]
        outputs.append(helper.make_tensor_value_info(name, TensorProto.DOUBLE, shape))
    arrays = {values[n]: c for n, c in program.constants.items() if c.dtype != object}
    arrays |= {name: np.array([axis], dtype=np.int64) for axis, name in _AXES.items()}
    # Runtimes warn of others, such as the widths of `Reshape`.
    used = {name for node in nodes for name in node.input}
    initializers = [numpy_helper.from_array(c, n) for n, c in arrays.items() if n in used]
    graph = helper.make_graph(nodes, "winnowgp", inputs, outputs, initializers)
    model = helper.make_model(
        graph,
        producer_name="winnowgp",
        producer_version=__version__,
        ir_version=IR_VERSION,
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid("ai.onnx.ml", ML_OPSET)],
    )
    facts = program.metadata.items()
    helper.set_model_props(model, {k: v if isinstance(v, str) else json.dumps(v) for k, v in facts})
    onnx.checker.check_model(model)
    with atomic_write(path) as temporary:
        temporary.write_bytes(model.SerializeToString())
    return path


def _nodes(helper: Any, step: Step, program: Program, values: dict[str, str]) -> list[Any]:
    """Return the ONNX nodes of a step."""
    inputs = [values[name] for name in step.inputs]
    out = values[step.output]
    if step.op in _SAME:
        return [helper.make_node(step.op, inputs, [out])]
    if step.op == "Concat":
        return [helper.make_node("Concat", inputs, [out], axis=1)]
    if step.op == "RowSum":
        return [helper.make_node("ReduceSum", [inputs[0], _AXES[-1]], [out], keepdims=1)]
    if step.op == "Mean1":
        return [helper.make_node("ReduceMean", [inputs[0], _AXES[1]], [out], keepdims=0)]
    if step.op == "Softmax":
        return [helper.make_node("Softmax", inputs, [out], axis=-1)]
    if step.op == "Unsqueeze1":
        return [helper.make_node("Unsqueeze", [inputs[0], _AXES[1]], [out])]
    if step.op == "Squeeze1":
        return [helper.make_node("Squeeze", [inputs[0], _AXES[1]], [out])]
    if step.op == "Missing":
        return [
            helper.make_node("IsNaN", inputs, [f"{out}_nan"]),
            helper.make_node("Cast", [f"{out}_nan"], [out], to=11),
        ]
    if step.op == "Filled":
        nan = helper.make_node("IsNaN", inputs[:1], [f"{out}_nan"])
        return [nan, helper.make_node("Where", [f"{out}_nan", inputs[1], inputs[0]], [out])]
    if step.op == "Reshape":
        shape = [-1, int(program.constants[step.inputs[1]])]
        return [
            helper.make_node("Constant", [], [f"{out}_shape"], value_ints=shape),
            helper.make_node("Reshape", [inputs[0], f"{out}_shape"], [out]),
        ]
    if step.op == "Indicator":
        # One where the column has a level; NaN in all columns where it has none of them.
        nan = helper.make_tensor(f"{out}_nv", 11, [], [float("nan")])
        return [
            helper.make_node("Equal", inputs, [f"{out}_equal"]),
            helper.make_node("Cast", [f"{out}_equal"], [f"{out}_one"], to=11),
            helper.make_node("ReduceSum", [f"{out}_one", _AXES[-1]], [f"{out}_sum"], keepdims=1),
            helper.make_node("Cast", [f"{out}_sum"], [f"{out}_known"], to=9),
            helper.make_node("Constant", [], [f"{out}_nan"], value=nan),
            helper.make_node("Where", [f"{out}_known", f"{out}_one", f"{out}_nan"], [out]),
        ]
    if step.op == "OneHot":
        categories = [str(category) for category in program.constants[step.inputs[1]]]
        hot = helper.make_node(
            "OneHotEncoder",
            inputs[:1],
            [f"{out}_32"],
            domain="ai.onnx.ml",
            cats_strings=categories,
            zeros=1,
        )
        return [hot, helper.make_node("Cast", [f"{out}_32"], [out], to=11)]
    if step.op == "Ndtr":
        # Φ(z) = ½ + ½ erf(z / √2); runtimes have erf in single precision only, accurate to 1e-7.
        return [
            helper.make_node("Cast", inputs, [f"{out}_z"], to=1),
            helper.make_node("Constant", [], [f"{out}_r"], value_float=float(0.5**0.5)),
            helper.make_node("Mul", [f"{out}_z", f"{out}_r"], [f"{out}_s"]),
            helper.make_node("Erf", [f"{out}_s"], [f"{out}_e"]),
            helper.make_node("Cast", [f"{out}_e"], [f"{out}_d"], to=11),
            helper.make_node(
                "Constant",
                [],
                [f"{out}_h"],
                value=helper.make_tensor(f"{out}_hv", 11, [], [0.5]),
            ),
            helper.make_node("Mul", [f"{out}_d", f"{out}_h"], [f"{out}_m"]),
            helper.make_node("Add", [f"{out}_m", f"{out}_h"], [out]),
        ]
    raise AssertionError(step.op)


_OPS = {
    "Add": "{0} + {1}",
    "Sub": "{0} - {1}",
    "Mul": "{0} * {1}",
    "Div": "{0} / {1}",
    "MatMul": "{0} @ {1}",
    "Pow": "{0} ** {1}",
    "Max": "np.maximum({0}, {1})",
    "Exp": "np.exp({0})",
    "Sqrt": "np.sqrt({0})",
    "Sin": "np.sin({0})",
    "Softplus": "np.logaddexp(0.0, {0})",
    "Sigmoid": "np.exp(-np.logaddexp(0.0, -{0}))",
    "Softmax": "_softmax({0})",
    "Ndtr": "_ndtr({0})",
    "RowSum": "{0}.sum(-1, keepdims=True)",
    "Mean1": "{0}.mean(1)",
    "Unsqueeze1": "{0}[:, None]",
    "Squeeze1": "{0}[:, 0]",
    "Reshape": "{0}.reshape(-1, int({1}))",
    "Indicator": "_indicator({0}, {1})",
    "Missing": "np.isnan({0}).astype(float)",
    "Filled": "np.where(np.isnan({0}), {1}, {0})",
    "OneHot": "_one_hot({0}, {1})",
}

_FILE = '''"""A predictor exported by winnowgp {version}. It needs only NumPy.

{about}

    from {module} import predict
    predictions = predict({example})

`predictions` is a dictionary of arrays: {outputs}.
"""

import base64
import datetime
import io
import math

import numpy as np

ABOUT = {facts}
ROWS = {rows}  # per chunk, to limit memory


def predict(data):
    """Return predictions for the rows of `data`, {data}."""
    columns = {columns}
    chunks = [_predict(*rows) for rows in _chunks(columns)]
    return {{name: np.concatenate([chunk[name] for chunk in chunks]) for name in {names}}}


def _chunks(columns):
    total = len(columns[0])
    if any(len(column) != total for column in columns):
        raise ValueError("all columns must have the same length")
    for start in range(0, max(total, 1), ROWS):
        yield [column[start : start + ROWS] for column in columns]


def _numbers(values, width):
    array = np.asarray(values)
    if array.dtype.kind in "mM":
        raise ValueError("expected numbers; got dates")
    array = array.astype(np.float64)
    expected = 1 if width is None else 2
    if array.ndim != expected or (width is not None and array.shape[1] != width):
        shape = "[N]" if width is None else f"[N, {{width}}]"
        raise ValueError(f"expected numbers of shape {{shape}}")
    return array


def _days(values):
    """Return dates in days since 1970: they may be datetimes, or strings such as 2024-03-01."""
    array = np.asarray(values)
    if array.dtype.kind == "M":
        return _numbers(_since_1970(array), None)
    if array.dtype.kind in "OU":
        array = np.array([_day(value) for value in array.ravel().tolist()]).reshape(array.shape)
    return _numbers(array, None)


def _day(value):
    if isinstance(value, (int, float)):
        return float(value)
    text = _string(value)
    if text is None or text.lower() in ("", "na", "nan", "nat"):
        return math.nan
    date = datetime.datetime.fromisoformat(text)
    date = date if date.tzinfo else date.replace(tzinfo=datetime.timezone.utc)
    return date.timestamp() / 86_400


def _since_1970(dates):
    days = dates.astype("datetime64[us]").astype(np.int64) / 86_400e6
    return np.where(np.isnat(dates), math.nan, days)


def _strings(values):
    """Return categories as winnowgp reads them: without surrounding blanks.

    Missing categories, such as NA, are encoded as unknown ones are, unless NA is a category.
    """
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError("expected one category per row")
    if array.dtype.kind == "M":
        return [None if t == "NaT" else str(t) for t in np.datetime_as_string(array, unit="s")]
    if array.dtype.kind == "f":
        array = array.astype(float)
    return [_string(value) for value in array.tolist()]


def _string(value):
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return None
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        if math.isnan(value):
            return None
        return str(int(value)) if value.is_integer() and abs(value) < 2.0**53 else repr(value)
    return str(value).strip()


def _one_hot(strings, categories):
    numbers = {{category: number for number, category in enumerate(categories)}}
    indices = np.array([numbers.get(string, -1) for string in strings], dtype=int)
    return (indices[:, None] == np.arange(len(categories))).astype(float)


def _indicator(column, levels):
    equal = (column == levels).astype(float)
    return np.where(equal.any(1, keepdims=True), equal, np.nan)


def _ndtr(z):
    return 0.5 * np.vectorize(math.erfc, otypes=[float])(-z / math.sqrt(2))


def _softmax(f):
    e = np.exp(f - f.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _predict({arguments}):
{steps}
    return {{{results}}}


_C = dict(np.load(io.BytesIO(base64.b64decode({constants})), allow_pickle=False))
'''


def save_numpy(program: Program, path: Path) -> Path:
    """Write a program as a Python file."""
    with atomic_write(path) as temporary:
        temporary.write_text(numpy_source(program, path.stem), encoding="utf-8")
    return path


def numpy_source(program: Program, module: str) -> str:
    """Return the Python file of a program, which is imported by the name `module`."""
    archive = io.BytesIO()
    numbers = {n: c for n, c in program.constants.items() if c.dtype != object}
    np.savez_compressed(archive, allow_pickle=False, **numbers)
    # Strings are written as Python literals: NumPy's drop trailing null characters.
    sources = {
        n: f"_C[{n!r}]" if n in numbers else ascii(c.tolist()) for n, c in program.constants.items()
    }
    steps = []
    for step in program.steps:
        names = [sources.get(n, n) for n in step.inputs]
        text = "np.concatenate([{}], 1)".format(", ".join(names))
        if step.op != "Concat":
            text = _OPS[step.op].format(*names)
        steps.append(f"    {step.output} = {text}")
    single = len(program.inputs) == 1 and program.inputs[0].width is not None
    readers = {"number": "_numbers({}, {})", "category": "_strings({})", "date": "_days({})"}
    columns = [
        readers[given.kind].format("data" if single else f"data[{given.name!r}]", given.width)
        for given in program.inputs
    ]
    note = {"dates": ", which are datetimes, strings such as 2024-03-01, or days since 1970"}
    about = [
        f"{name}: {json.dumps(value)}{note.get(name, '')}"
        for name, value in program.metadata.items()
        if value
    ]
    # JSON, not repr: the name of a column must not end the docstring.
    keys = ", ".join(f"{json.dumps(given.name)}: [...]" for given in program.inputs)
    return _FILE.format(
        version=__version__,
        about="\n".join(about),
        module=module,
        example="X" if single else "{" + keys + "}",
        outputs=", ".join(program.outputs),
        facts=repr(program.metadata),
        rows=program.rows,
        data="an array" if single else "a dictionary of columns",
        columns="[" + ", ".join(columns) + "]",
        names=list(program.outputs),
        arguments=", ".join(f"input{i}" for i in range(len(program.inputs))),
        steps="\n".join(steps),
        results=", ".join(f"{name!r}: {value}" for name, (value, _) in program.outputs.items()),
        constants=repr(base64.b64encode(archive.getvalue()).decode()),
    )
