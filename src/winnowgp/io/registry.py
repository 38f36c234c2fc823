"""One serialiser for models, estimators and checkpoints; `save` and `load`.

A value is None, a Boolean, a number, a string, a tensor or a numeric array; a list, tuple or
dictionary of values; or an object of a class that `register` has made known. `serialise` turns a
value into JSON and named tensors, `deserialise` does the reverse. In JSON

    {"$tensor": name}, {"$array": name}     refers to a tensor of the file, at most once each
    {"$float": "inf"}                       is a number that JSON does not have
    {"$tuple": [...]}, {"$pairs": [...]}    is a tuple, or a dictionary with keys of any type
    {"$object": kind, "state": {...}}       is an object, built from its state

and everything else is itself. The registry maps the name of a kind to the fields of its state and
to the function that builds an object from them. A file can therefore only name kinds; it cannot
name code. Packages above `io` register their own classes when they are imported.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import (
    Any,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import numpy as np
import torch
from jaxtyping import jaxtyped
from torch import Tensor, nn

from winnowgp.errors import ModelFileError, NotSaveableError, WinnowError
from winnowgp.io.format import Archive, read_archive, unreadable, write_archive
from winnowgp.linalg import single_thread

_Build = TypeVar("_Build", bound=Callable[..., Any])

State: TypeAlias = Any
"""A value that `serialise` accepts.

A NumPy scalar comes back as the Python number, a tensor without dimensions as a tensor.
"""

# What constructors and PyTorch raise where contents with a valid checksum make no sense.
_CONTENT_ERRORS = (
    WinnowError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    RuntimeError,
    OverflowError,
)

_MAX_OBJECTS = 10_000
"""Objects in one file. Each takes a few bytes of JSON, but kilobytes of memory."""


def save(model: Any, path: str | os.PathLike[str]) -> Path:
    """Save a model to a file that `load` reads; the file appears complete or not at all.

    The size of the file grows with the number of inducing points M, not with the number of
    observations N, except that a GP-LVM also has the latent positions of its N training rows.

    Args:
        model: a fitted estimator, a `TabularModel`, a model or a posterior.

    Raises:
        NotSaveableError: the model contains a component, such as a custom kernel, that cannot be
            serialised.
    """
    if _kind_of(model) is None:
        raise NotSaveableError(
            "`model` must be an estimator, a `TabularModel`, a model or a posterior of winnowgp; "
            f"got a {type(model).__name__}, which cannot be saved. Use pickle for other objects, "
            "where the file is trusted."
        )
    return write_archive(serialise("Model", model), Path(path))


def load(path: str | os.PathLike[str]) -> Any:
    """Load what `save` wrote to a file; tensors are on the CPU.

    Loading executes nothing that the file contains. It copies and checks tensors on one thread:
    several would wait for each other beside busy processes.

    Raises:
        ModelFileError: the file was not written by winnowgp, is truncated or damaged, has a newer
            format, or has inconsistent contents.
    """
    with single_thread(), _opened(Path(path)) as archive:
        model = deserialise(archive)
        if _kind_of(model) is None:
            raise ModelFileError("contains no model")
        return model


def load_field(path: str | os.PathLike[str], field: str, hint: Any) -> tuple[str, Any]:
    """Load one field of the model in a file, without building the model.

    The class of the model need not be known, hence not imported.

    Args:
        path: a file that `save` wrote.
        field: name of the field.
        hint: its type, as in `register`.

    Returns:
        The kind of the model; and the field, None if the kind has no such field.

    Raises:
        ModelFileError: as for `load`.
    """
    with _opened(Path(path)) as archive:
        kind, state = archive.outline["$object"], archive.outline["state"]
        if field not in state:
            return kind, None
        value = _Decoder(dict(archive.tensors)).decode(state[field])
        _check_fields(kind, {field: hint}, {field: value})
        return kind, value


@contextmanager
def _opened(path: Path) -> Iterator[Archive]:
    """Yield the archive of a model; errors about its contents become a `ModelFileError`."""
    archive = read_archive(path)
    try:
        if archive.kind != "Model":
            raise ModelFileError(f"is a {archive.kind}, not a model")
        yield archive
    except ModelFileError as error:
        raise ModelFileError(f"{path}: {error}.") from error
    except _CONTENT_ERRORS as error:
        raise unreadable(path) from error


def register(
    kind: str,
    cls: type,
    *,
    fields: Mapping[str, Any] | None = None,
    state: Callable[[Any], dict[str, State]] | None = None,
    frozen: bool = False,
    subclasses: bool = False,
) -> Callable[[_Build], _Build]:
    """Make a class known to `serialise` and `deserialise`; decorates the function that builds it.

    Args:
        kind: name of the class in files.
        cls: the class.
        fields: type of each argument of the function, by default its annotations, checked before
            the function is called. Shapes are jaxtyping annotations, whose axes must agree within
            one object; arrays must be finite unless the type is a plain `Tensor`.
        state: from an object to these arguments; by default its attributes of the same names.
        frozen: whether a module keeps which of its parameters are not trained.
        subclasses: whether subclasses are of this kind too; the function must tell them apart.

    >>> @dataclass
    ... class Interval:
    ...     lower: float
    ...     upper: float
    >>> build = register("Interval", Interval)(Interval)
    >>> archive = serialise("Model", Interval(0.0, float("inf")))
    >>> archive.outline
    {'$object': 'Interval', 'state': {'lower': 0.0, 'upper': {'$float': 'inf'}}}
    >>> deserialise(archive)
    Interval(lower=0.0, upper=inf)
    """

    def decorate(build: _Build) -> _Build:
        types = dict(_argument_types(build) if fields is None else fields)
        if frozen:
            types["frozen"] = list[str]
        _CODECS[kind] = _Codec(cls, types, state, build, subclasses)
        return build

    return decorate


def register_class(
    cls: type,
    rules: Mapping[str, Callable[[Any], Any]] | None = None,
    *,
    fields: Mapping[str, Any] | None = None,
    state: Callable[[Any], dict[str, State]] | None = None,
) -> None:
    """Make a class known that its constructor builds, under its own name.

    Args:
        cls: the class.
        rules: what the fields must be, and a function of the fields that says whether they are.
        fields: as in `register`; by default the arguments of the constructor.
        state: as in `register`.

    >>> @dataclass
    ... class Share:
    ...     percent: float
    >>> register_class(Share, {"at most 100 %": lambda own: own.percent <= 100})
    >>> deserialise(Archive("Model", {"$object": "Share", "state": {"percent": 120.0}}, {}))
    Traceback (most recent call last):
    winnowgp.errors.ModelFileError: a Share must have at most 100 %
    """

    def build(**arguments: Any) -> Any:
        own = SimpleNamespace(**arguments)
        for rule, holds in (rules or {}).items():
            if not holds(own):
                raise ModelFileError(f"a {cls.__name__} must have {rule}")
        return cls(**arguments)

    types = _argument_types(cls) if fields is None else fields
    register(cls.__name__, cls, fields=types, state=state)(build)


def serialise(kind: str, value: State) -> Archive:
    """Encode a value for a file of a kind.

    >>> deserialise(serialise("Checkpoint", {"bound": float("-inf"), "sizes": (3, [4, None])}))
    {'bound': -inf, 'sizes': (3, [4, None])}

    Raises:
        NotSaveableError: the value contains something that cannot be serialised.
    """
    tensors: dict[str, Tensor] = {}
    return Archive(kind, _encode(value, tensors, ()), tensors)


def deserialise(archive: Archive) -> State:
    """Decode the value of an archive.

    Raises:
        ModelFileError: an object does not have the fields of its kind.
        LookupError, TypeError, ValueError: the outline is not what `serialise` writes.
    """
    return _Decoder(dict(archive.tensors)).decode(archive.outline)


@dataclass(frozen=True, slots=True)
class _Codec:
    cls: type
    fields: Mapping[str, Any]
    state: Callable[[Any], dict[str, State]] | None
    build: Callable[..., Any]
    subclasses: bool


_CODECS: dict[str, _Codec] = {}


def _argument_types(build: Callable[..., Any]) -> dict[str, Any]:
    hints = get_type_hints(build.__init__ if isinstance(build, type) else build)
    return {name: hint for name, hint in hints.items() if name != "return"}


def _kind_of(value: object) -> str | None:
    for kind, codec in _CODECS.items():
        if type(value) is codec.cls or (codec.subclasses and isinstance(value, codec.cls)):
            return kind
    return None


def _encode(value: State, tensors: dict[str, Tensor], path: tuple[str, ...]) -> Any:
    """Encode the value at a path; its tensors are added to `tensors` under that path."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not isfinite(value):
        return {"$float": str(value)}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        return {"$tensor": _add(value, tensors, path)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.dtype.isnative:
        return {"$array": _add(torch.from_numpy(np.array(value)), tensors, path)}
    if isinstance(value, Mapping):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _encode(entry, tensors, (*path, key)) for key, entry in value.items()}
        # JSON would turn 0 into "0", and optimisers number their parameters.
        return {
            "$pairs": [
                [_encode(part, tensors, (*path, str(key))) for part in (key, entry)]
                for key, entry in value.items()
            ]
        }
    if isinstance(value, list | tuple):
        entries = [_encode(entry, tensors, (*path, str(i))) for i, entry in enumerate(value)]
        return entries if isinstance(value, list) else {"$tuple": entries}
    kind = _kind_of(value)
    if kind is not None:
        return {"$object": kind, "state": _encode(_state(value, _CODECS[kind]), tensors, path)}
    where = f"`{'.'.join(path)}`" if path else "the value"
    raise NotSaveableError(
        f"{where} must consist of numbers, strings, tensors and numeric arrays, lists, tuples and "
        f"dictionaries of these, and models; got {type(value).__name__}, which cannot be saved."
    )


def _state(value: Any, codec: _Codec) -> dict[str, State]:
    if codec.state is not None:
        state = codec.state(value)
    else:
        state = {name: getattr(value, name) for name in codec.fields if name != "frozen"}
    if "frozen" in codec.fields:
        state["frozen"] = [name for name, p in value.named_parameters() if not p.requires_grad]
    return state


def _add(tensor: Tensor, tensors: dict[str, Tensor], path: tuple[str, ...]) -> str:
    """Add a tensor under the name of its path, changed where it is taken or not allowed."""
    name = "/".join(path).encode("ascii", "backslashreplace").decode()
    while name in tensors or name in ("", "__metadata__"):
        name += "_"
    tensors[name] = tensor
    return name


@dataclass(slots=True)
class _Decoder:
    tensors: dict[str, Tensor]
    """Tensors not used yet: if one were used twice, a small file could fill the memory."""
    objects: int = 0

    def decode(self, outline: Any) -> State:
        if isinstance(outline, list):
            return [self.decode(entry) for entry in outline]
        if not isinstance(outline, dict):
            return outline
        marks = [key for key in outline if key.startswith("$")]
        if not marks:
            return {key: self.decode(entry) for key, entry in outline.items()}
        if marks == ["$object"] and outline.keys() == {"$object", "state"}:
            return self._object(outline["$object"], outline["state"])
        ((mark, content),) = outline.items()
        if mark == "$tensor":
            # A copy: the alignment of a tensor in the file must not decide how results round.
            return self.tensors.pop(content).clone()
        if mark == "$array":
            return self.tensors.pop(content).numpy().copy()
        if mark == "$float":
            return float(content)
        if mark == "$tuple":
            return tuple(self.decode(entry) for entry in content)
        if mark == "$pairs":
            return {self.decode(key): self.decode(entry) for key, entry in content}
        raise ModelFileError(f"contains {mark!r}, which this version of winnowgp does not know")

    def _object(self, kind: Any, outline: Any) -> Any:
        self.objects += 1
        if self.objects > _MAX_OBJECTS:
            raise ModelFileError(f"contains more than {_MAX_OBJECTS} objects")
        if not isinstance(kind, str) or kind not in _CODECS:
            raise ModelFileError(
                f"contains a {kind!r:.60}, which this version of winnowgp does not know; load "
                "estimators with `winnowgp.load`"
            )
        state = self.decode(outline)
        codec = _CODECS[kind]
        _check_fields(kind, codec.fields, state)
        frozen = state.pop("frozen", [])
        value = codec.build(**state)
        if frozen:
            freeze(value, frozen)
        return value


def freeze(module: nn.Module, names: list[str]) -> None:
    """Exclude parameters of a module from training."""
    parameters = dict(module.named_parameters())
    for name in names:
        parameters[name].requires_grad_(False)


def _check_fields(kind: str, fields: Mapping[str, Any], state: Any) -> None:
    differing = state.keys() ^ fields.keys() if isinstance(state, dict) else set(fields)
    if differing:
        raise ModelFileError(f"lacks fields of a {kind}, or has others: {listed(differing)}")
    # Axes with one name have one size in all fields of the object.
    with jaxtyped("context"):
        for name, hint in fields.items():
            value = state[name]
            if not matches(value, hint) or not (hint is Tensor or _finite(value)):
                size = f" of shape {list(value.shape)}" if hasattr(value, "shape") else ""
                raise ModelFileError(
                    f"{name!r} of a {kind} must be {_name(hint)}; got {type(value).__name__}{size}"
                )


def matches(value: Any, hint: Any) -> bool:
    """Return whether a value is of a type, which may be nested; a Boolean is not an integer."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, UnionType):
        return any(matches(value, argument) for argument in arguments)
    if is_typeddict(hint):
        hints = get_type_hints(hint)
        return (
            isinstance(value, dict)
            and hint.__required_keys__ <= value.keys() <= hints.keys()
            and all(matches(entry, hints[name]) for name, entry in value.items())
        )
    if origin is list:
        return isinstance(value, list) and all(matches(entry, arguments[0]) for entry in value)
    if origin is tuple:  # a list in plain JSON
        if arguments[-1] is ...:
            arguments = arguments[:1] * len(value) if isinstance(value, list | tuple) else ()
        return (
            isinstance(value, list | tuple)
            and len(value) == len(arguments)
            and all(map(matches, value, arguments))
        )
    if origin is dict:
        return isinstance(value, dict) and all(
            matches(key, arguments[0]) and matches(entry, arguments[1])
            for key, entry in value.items()
        )
    if hint is float:
        return type(value) in (int, float)
    return type(value) is hint if hint in (bool, int, str) else isinstance(value, hint)


def _finite(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_finite, value))
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    return (
        not isinstance(value, Tensor)
        or not value.is_floating_point()
        or bool(torch.isfinite(value).all())
    )


def listed(names: set[str]) -> str:
    """Return the first few names, which a file may have made long and many."""
    return ", ".join(f"{name:.40}" for name in sorted(names)[:5])


def _name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint)
