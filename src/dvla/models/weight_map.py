"""How the tensors of a foreign checkpoint correspond to our parameters: declared once, used to import and to export."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, reduce

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dvla.models.checkpoint_files import CheckpointFiles, listed
from dvla.planes.weights import shard_rows

Shape = tuple[int, ...]


def identity(parameter: Tensor) -> Tensor:
    """The whole parameter."""
    return parameter


def rows(start: int | None, stop: int | None) -> Callable[[Tensor], Tensor]:
    """View of some rows of a parameter."""
    return lambda parameter: parameter[start:stop]


@dataclass(frozen=True)
class Part:
    """A region of one of our parameters."""

    parameter: str
    view: Callable[[Tensor], Tensor] = identity
    """Takes the whole parameter, returns a writable view of the region, in the shape it has in the checkpoint."""


@dataclass(frozen=True)
class Rule:
    """A tensor of the checkpoint is its parts, one after the other along the first axis."""

    sources: tuple[str, ...]
    """Its name; of several, aliases of the same tensor, at least one must be there and the first of them is read."""
    parts: tuple[Part, ...]
    addends: tuple[Part, ...] = ()
    """Regions that only we have and that the computation adds to this tensor: zero after an import, and added to it by an
    export."""


@dataclass(frozen=True)
class WeightMap:
    """The correspondence of a whole checkpoint."""

    rules: tuple[Rule, ...]
    zeros: tuple[Part, ...] = ()
    """Regions of our parameters that no checkpoint holds, that are zero, and that are never read."""
    dead: Mapping[str, Shape] = field(default_factory=dict)
    """Tensors that no computation reads, but that the original writes, and their shapes. They need not be there."""
    leftovers: frozenset[str] = frozenset()
    """Further tensors that no computation reads and that only some checkpoints hold, of any shape."""

    @cached_property
    def rule_of(self) -> dict[str, Rule]:
        """The rule of each tensor of the checkpoint."""
        return {source: rule for rule in self.rules for source in rule.sources}

    @cached_property
    def rules_of(self) -> dict[str, list[Rule]]:
        """The rules that have a part of each of our parameters."""
        found: dict[str, list[Rule]] = {}
        for rule in self.rules:
            for name in dict.fromkeys(part.parameter for part in rule.parts):
                found.setdefault(name, []).append(rule)
        return found


def layer(source: str, *targets: str) -> list[Rule]:
    """Rules for weight and bias of a layer of the checkpoint, the stack of our layers `targets`."""
    return [
        Rule((f"{source}.{kind}",), tuple(Part(f"{target}.{kind}") for target in targets))
        for kind in ("weight", "bias")
    ]


def source_shapes(weight_map: WeightMap, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Shapes of the tensors of a checkpoint, aliases included, for our parameters of `shapes`.

    Raises:
        ValueError: The map does not cover our parameters exactly once.
    """
    _require_cover(weight_map, shapes)
    found: dict[str, Shape] = {}
    for rule in weight_map.rules:
        parts = [_shape_of(part, shapes) for part in rule.parts]
        shape = (sum(part[0] for part in parts), *parts[0][1:])
        found |= dict.fromkeys(rule.sources, shape)
    return found


def check(weight_map: WeightMap, shapes: Mapping[str, Shape], files: CheckpointFiles) -> None:
    """Compare all tensors of a checkpoint with our parameters, of the given canonical names and shapes.

    Raises:
        ConfigError: Tensors are missing, unexpected or of another shape; lists them.
        ValueError: The map does not cover our parameters exactly once.
    """
    expected = source_shapes(weight_map, shapes) | dict(weight_map.dead)
    there = files.tensors
    missing = [" or ".join(rule.sources) for rule in weight_map.rules if not any(s in there for s in rule.sources)]
    unexpected = [name for name in there if name not in expected and name not in weight_map.leftovers]
    misshapen = [
        f"{name} {info.shape}, not {expected[name]}"
        for name, info in there.items()
        if expected.get(name, info.shape) != info.shape
    ]
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape": misshapen}
    if found := [f"{len(names)} {kind}: {listed(names)}" for kind, names in kinds.items() if names]:
        raise files.error("its tensors do not fit the model; " + "; ".join(found))


@torch.no_grad()
def load_parameters(parameters: Mapping[str, Tensor], weight_map: WeightMap, files: CheckpointFiles) -> None:
    """Fill our parameters, one at a time, in their own dtype and on their own device.

    Args:
        parameters: By canonical name; plain, or sharded along the first axis, then only the local rows are filled.
        weight_map: The correspondence, checked before with `check`.
        files: The checkpoint.
    """
    for rule in weight_map.rules:
        there = [source for source in rule.sources if source in files.tensors]
        for other in there[1:]:
            if not torch.equal(files.read(there[0]), files.read(other)):
                raise files.error(f"{there[0]} and {other} should be the same tensor, but differ")
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        fill_parameter(parameter, _assemble(name, shapes, weight_map, files))


@torch.no_grad()
def fill_parameter(parameter: Tensor, full: Tensor) -> None:
    """Copy a full plain tensor into a parameter, plain or sharded along the first axis."""
    if isinstance(parameter, DTensor):
        start, stop = shard_rows(parameter)
        parameter, full = parameter.to_local(), full[start:stop]
    if parameter.numel():
        parameter.copy_(full)


@torch.no_grad()
def export_tensor(weight_map: WeightMap, source: str, read_parameter: Callable[[str], Tensor]) -> Tensor:
    """One tensor of the checkpoint.

    Args:
        weight_map: The correspondence.
        source: Name of the tensor; may be an alias.
        read_parameter: Gives the full plain parameter of a canonical name. Which ones are read, and in which order,
            depends on `source` alone, so this may be a collective call.
    """
    rule = weight_map.rule_of[source]
    parts = [part.view(read_parameter(part.parameter)) for part in rule.parts]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    for part in rule.addends:
        addend = part.view(read_parameter(part.parameter))
        if addend.any():  # a negative zero would not survive the addition of nothing
            whole = whole + addend
    return whole


def _assemble(name: str, shapes: Mapping[str, Shape], weight_map: WeightMap, files: CheckpointFiles) -> Tensor:
    """The full parameter `name`, in the dtype of the checkpoint."""
    rules = weight_map.rules_of.get(name, [])
    sources = [next(source for source in rule.sources if source in files.tensors) for rule in rules]
    if [rule.parts for rule in rules] == [(Part(name),)]:
        return files.read(sources[0])
    dtype = reduce(torch.promote_types, [files.tensors[source].dtype for source in sources] or [torch.float32])
    full = torch.zeros(shapes[name], dtype=dtype, device="cpu")  # what no rule fills stays zero
    for rule, source in zip(rules, sources, strict=True):
        lengths = [_shape_of(part, shapes)[0] for part in rule.parts]
        for part, piece in zip(rule.parts, files.read(source).split(lengths), strict=True):
            if part.parameter == name:
                part.view(full).copy_(piece)
    return full


def _shape_of(part: Part, shapes: Mapping[str, Shape]) -> torch.Size:
    return part.view(torch.empty(shapes[part.parameter], device="meta")).shape


def _require_cover(weight_map: WeightMap, shapes: Mapping[str, Shape]) -> None:
    """Raise ValueError unless every element of our parameters has one place in the map."""
    parts: dict[str, list[Part]] = {}
    for part in (*weight_map.zeros, *(part for rule in weight_map.rules for part in (*rule.parts, *rule.addends))):
        parts.setdefault(part.parameter, []).append(part)
    if wrong := set(parts) ^ set(shapes):
        raise ValueError(f"parameters are only in the map or only in the model: {listed(sorted(wrong))}")
    for name, shape in shapes.items():
        if len(parts[name]) == 1:
            covered = _shape_of(parts[name][0], shapes).numel() == torch.Size(shape).numel()
        else:
            count = torch.zeros(shape, dtype=torch.uint8)
            for part in parts[name]:
                part.view(count).add_(1)
            covered = bool((count == 1).all())
        if not covered:
            raise ValueError(f"the map does not cover {name} {shape} exactly once")
