"""A program as an ONNX model, in float64."""

from pathlib import Path
from typing import Any

import numpy as np

from winnowgp import __version__
from winnowgp.errors import InputError, MissingExtraError
from winnowgp.io.program import Program, Step
from winnowgp.io.written_whole import written_whole

OPSET, ML_OPSET, IR_VERSION = 18, 3, 9
_AXES = {-1: "winnowgp/last", 1: "winnowgp/second"}
_SAME = ("Add", "Sub", "Mul", "Div", "MatMul", "Exp", "Sqrt", "Sin", "Pow", "Max", "Softplus")


def save_onnx(program: Program, path: Path) -> Path:
    """Write a program as ONNX, whole or not at all; the model is checked first."""
    try:
        import onnx
        from onnx import TensorProto, helper, numpy_helper
    except ImportError:
        raise MissingExtraError(
            "export to ONNX needs onnx: pip install 'winnowgp[onnx]'; or export to numpy."
        ) from None
    taken = {given.name for given in program.inputs} & set(program.outputs)
    if taken:
        raise InputError(
            f"ONNX cannot have {', '.join(taken)} as input and as output; rename the column."
        )
    # No name of a column is like the names of what is in between.
    own = [*program.constants, *(step.output for step in program.steps)]
    values = {name: f"winnowgp/{name}" for name in own}
    values |= {f"input{i}": given.name for i, given in enumerate(program.inputs)}
    inputs = [
        helper.make_tensor_value_info(
            given.name,
            TensorProto.STRING if given.words else TensorProto.DOUBLE,
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
    numbers = {n: c for n, c in program.constants.items() if c.dtype != object}
    initializers = [numpy_helper.from_array(c, values[n]) for n, c in numbers.items()]
    initializers += [
        numpy_helper.from_array(np.array([axis], dtype=np.int64), _AXES[axis]) for axis in _AXES
    ]
    graph = helper.make_graph(nodes, "winnowgp", inputs, outputs, initializers)
    model = helper.make_model(
        graph,
        producer_name="winnowgp",
        producer_version=__version__,
        ir_version=IR_VERSION,
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid("ai.onnx.ml", ML_OPSET)],
    )
    helper.set_model_props(model, program.about)
    onnx.checker.check_model(model)
    with written_whole(path) as part:
        part.write_bytes(model.SerializeToString())
    return path


def _nodes(helper: Any, step: Step, program: Program, values: dict[str, str]) -> list[Any]:
    """One step as one node or a few."""
    given = [values[name] for name in step.inputs]
    out = values[step.output]
    if step.op in _SAME:
        return [helper.make_node(step.op, given, [out])]
    if step.op == "Concat":
        return [helper.make_node("Concat", given, [out], axis=1)]
    if step.op == "RowSum":
        return [helper.make_node("ReduceSum", [given[0], _AXES[-1]], [out], keepdims=1)]
    if step.op == "Mean1":
        return [helper.make_node("ReduceMean", [given[0], _AXES[1]], [out], keepdims=0)]
    if step.op == "Softmax":
        return [helper.make_node("Softmax", given, [out], axis=-1)]
    if step.op == "Unsqueeze1":
        return [helper.make_node("Unsqueeze", [given[0], _AXES[1]], [out])]
    if step.op == "Squeeze1":
        return [helper.make_node("Squeeze", [given[0], _AXES[1]], [out])]
    if step.op == "Missing":
        return [
            helper.make_node("IsNaN", given, [f"{out}_nan"]),
            helper.make_node("Cast", [f"{out}_nan"], [out], to=11),
        ]
    if step.op == "Filled":
        nan = helper.make_node("IsNaN", given[:1], [f"{out}_nan"])
        return [nan, helper.make_node("Where", [f"{out}_nan", given[1], given[0]], [out])]
    if step.op == "OneHot":
        words = [str(word) for word in program.constants[step.inputs[1]]]
        hot = helper.make_node(
            "OneHotEncoder",
            given[:1],
            [f"{out}_32"],
            domain="ai.onnx.ml",
            cats_strings=words,
            zeros=1,
        )
        return [hot, helper.make_node("Cast", [f"{out}_32"], [out], to=11)]
    if step.op == "Ndtr":
        # Φ(z) = ½ + ½ erf(z / √2); runtimes have erf in single precision only, good to 1e-7.
        return [
            helper.make_node("Cast", given, [f"{out}_z"], to=1),
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
