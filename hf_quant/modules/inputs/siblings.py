"""Search for linear layers of a model that read the same tensor, in the source of their parents' `forward`.

`self.q_proj(hidden_states)`, `self.k_proj(hidden_states)`, `self.v_proj(hidden_states)` with no assignment to
`hidden_states` in between, in the same branch, are siblings whatever they are called; so are gate and up projections,
the first projections of latent attention, those of linear attention. Where another object calls the layers (the
attention processors of diffusers), a short list of names stands in; the source of the processor, and of the functions
to which it passes the module, may prove it.

The finding is a proposal: `FusedProjections` looks at the tensor itself at every call.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import cache
from typing import NamedTuple

from torch import nn


# Of layers that their parent's `forward` does not call itself.
_NAMES = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("to_q", "to_k", "to_v"),
    ("to_query", "to_key", "to_value"),
    ("add_q_proj", "add_k_proj", "add_v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
_METADATA = {"shape", "dtype", "device", "ndim", "size", "dim", "numel"}  # reading them keeps no second reference


class Siblings(NamedTuple):
    """Layers that read one tensor.

    Attributes:
        names: their names in the model, in the order of the calls.
        is_proven: nothing between the first and the last call can change the tensor in place, by the source.
    """

    names: tuple[str, ...]
    is_proven: bool


def find_siblings(model: nn.Module, linears: Mapping[str, Hashable]) -> Iterator[Siblings]:
    """The groups of at least two layers of `linears` that read one tensor and have equal values there.

    `linears` is {module name: whatever must be equal for a common product}. Layers inside of PEFT's wrappers count as
    the wrapped ones.
    """
    if not linears:  # or the source of every class would be read for nothing
        return
    taken: set[int] = set()
    for name, parent in model.named_modules():
        prefix = f"{name}." if name else ""
        for attributes, is_proven in _groups(parent):
            # By scheme: places in the order of the calls, and names. Other linear layers leave their input as it is.
            found: dict[Hashable, dict[int, str]] = {}
            suspects = []
            for place, attribute in enumerate(attributes):
                full = _innermost(model, prefix + attribute, linears)
                if full is None and not isinstance(parent._modules.get(attribute), nn.Linear):
                    suspects.append(place)
                elif full is not None and id(model.get_submodule(full)) not in taken:
                    found.setdefault(linears[full], {})[place] = full
            for names in found.values():
                modules = {id(model.get_submodule(n)) for n in names.values()}
                if len(modules) == len(names) > 1:
                    taken |= modules
                    no_suspect = not any(min(names) < place < max(names) for place in suspects)
                    yield Siblings(tuple(names.values()), is_proven and no_suspect)


def _groups(parent: nn.Module) -> Iterator[tuple[tuple[str, ...], bool]]:
    children = parent._modules
    if len(children) < 2:
        return
    called, groups, _ = _reads(type(parent).forward, "self")
    # A forward of its own, such as a host's hook, may do anything around the class's.
    is_seen = "forward" not in parent.__dict__
    yield from ((names, is_proven and is_seen) for names, is_proven in groups)
    # Cross attention: to_k and to_v read another tensor than to_q.
    if not getattr(parent, "is_cross_attention", False):
        by_processor = {frozenset(names) for names, is_proven in _processor_groups(parent) if is_proven and is_seen}
        yield from ((names, frozenset(names) in by_processor) for names in _NAMES if not called.intersection(names))


def _processor_groups(parent: nn.Module) -> Iterator[tuple[tuple[str, ...], bool]]:
    """The groups of layers of `parent` that read one tensor in the `__call__` of its processor."""
    call = inspect.getattr_static(type(getattr(parent, "processor", None)), "__call__", None)
    if not inspect.isfunction(call):
        return
    seen, waiting = set(), [(inspect.unwrap(call), 1)]  # a function, and which of its arguments is `parent`
    while waiting:
        function, place = waiting.pop()
        parameters = list(inspect.signature(function).parameters)
        if function in seen or place >= len(parameters):
            continue
        seen.add(function)
        groups, passes_to = _reads(function, parameters[place])[1:]
        yield from groups
        for name in passes_to:
            helper = function.__globals__.get(name)
            if inspect.isfunction(helper):
                waiting.append((inspect.unwrap(helper), 0))


def _innermost(model: nn.Module, name: str, linears: Mapping[str, Hashable]) -> str | None:
    """`name`, or the layer that PEFT has wrapped under it, if it is one of `linears`."""
    while name not in linears:
        name = f"{name}.base_layer"
        try:
            model.get_submodule(name)
        except AttributeError:
            return None
    return name


@cache
def _reads(
    forward: Callable, receiver: str
) -> tuple[frozenset[str], tuple[tuple[tuple[str, ...], bool], ...], frozenset[str]]:
    """The use that a function makes of the module that it knows as `receiver`.

    (Attributes that it calls, its groups of them that read one tensor and whether that is proven, names of the
    functions to which it passes the module first.)
    """
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(forward)))
        function = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError):  # compiled, or written at a prompt
        return frozenset(), (), frozenset()
    reader = _Reader(receiver)
    for statement in getattr(function, "body", ()):
        reader.visit(statement)
    groups: dict[tuple, dict[str, int]] = {}
    for call in reader.calls:
        groups.setdefault((call.argument, call.epoch, call.branch), {}).setdefault(call.attribute, call.position)
    found: list[tuple[tuple[str, ...], bool]] = []
    seen: set[str] = set()
    for (argument, *_), positions in sorted(groups.items(), key=lambda item: -len(item[1])):
        names = tuple(positions)
        if len(names) > 1 and not seen.intersection(names):
            first, last = min(positions.values()), max(positions.values())
            hazards = (*reader.hazards, *reader.uses.get(argument, ()))
            found.append((names, not any(first < position < last for position in hazards)))
            seen.update(names)
    return frozenset(call.attribute for call in reader.calls), tuple(found), frozenset(reader.passes_to)


class _Call(NamedTuple):
    attribute: str
    argument: str
    epoch: tuple[int, int]  # assignments to the argument, and ways out of the function, before it
    branch: tuple[tuple[int, str], ...]
    position: int


class _Reader(ast.NodeVisitor):
    """Collects `<receiver>.<attribute>(<name>)` in the order of evaluation.

    Attributes:
        passes_to: names of the functions called with the receiver as their first argument.
        hazards: where something is changed in place: a method whose name ends in "_", `out=`, an item, `+=`.
        uses: {name: where it is used otherwise than as the argument of such a call}.
    """

    def __init__(self, receiver: str) -> None:
        self.receiver = receiver
        self.calls: list[_Call] = []
        self.passes_to: set[str] = set()
        self.hazards: list[int] = []
        self.uses: dict[str, list[int]] = {}
        self.assigned: dict[str, int] = {}
        self.exits = 0
        self.branch: tuple[tuple[int, str], ...] = ()
        self.position = 0

    def visit(self, node: ast.AST) -> None:
        self.position += 1
        super().visit(node)

    def inside(self, node: ast.AST, *fields: str) -> None:
        """Visit the fields of a node as branches of their own."""
        outer = self.branch
        for field in fields:
            self.branch = (*outer, (id(node), field))
            value = getattr(node, field)
            for child in value if isinstance(value, list) else [value]:
                self.visit(child)
        self.branch = outer

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        is_own = isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)
        if (
            is_own
            and function.value.id == self.receiver
            and len(node.args) == 1
            and isinstance(node.args[0], ast.Name)
        ):
            argument = node.args[0].id
            epoch = (self.assigned.get(argument, 0), self.exits)
            self.calls.append(_Call(function.attr, argument, epoch, self.branch, self.position))
            for keyword in node.keywords:
                self.visit(keyword)
            return
        first = node.args[0] if node.args else None
        if isinstance(function, ast.Name) and isinstance(first, ast.Name) and first.id == self.receiver:
            self.passes_to.add(function.id)
        self.generic_visit(node)
        changes = isinstance(function, ast.Attribute) and function.attr.endswith("_")
        if changes and isinstance(function.value, ast.Name):
            self.assign(function.value.id)
        if changes or any(keyword.arg in ("out", "inplace") for keyword in node.keywords):
            self.hazards.append(self.position)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not (isinstance(node.value, ast.Name) and node.attr in _METADATA):
            self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self.uses.setdefault(node.id, []).append(self.position)
        else:
            self.assign(node.id)

    def assign(self, name: str) -> None:
        self.assigned[name] = self.assigned.get(name, 0) + 1

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self.visit(target)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
        self.visit(node.target)

    visit_NamedExpr = visit_AnnAssign

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        self.visit(node.target)
        self.hazards.append(self.position)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.generic_visit(node)
        if isinstance(node.ctx, ast.Store):
            self.hazards.append(self.position)

    def visit_If(self, node: ast.If | ast.IfExp | ast.While) -> None:
        self.visit(node.test)
        self.inside(node, "body", "orelse")

    visit_IfExp = visit_While = visit_If

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self.visit(node.target)
        self.inside(node, "body", "orelse")

    def visit_With(self, node: ast.With) -> None:  # as of autocast: what is outside differs
        for item in node.items:
            self.visit(item)
        self.inside(node, "body")

    def visit_Try(self, node: ast.Try) -> None:
        self.inside(node, "body", "handlers", "orelse", "finalbody")

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        outer = self.branch
        for i, value in enumerate(node.values):  # the first is always evaluated, each of the others after the last
            self.branch = (*self.branch, (id(node), str(i))) if i else outer
            self.visit(value)
        self.branch = outer

    def visit_Return(self, node: ast.Return | ast.Raise | ast.Break | ast.Continue) -> None:
        self.generic_visit(node)
        self.exits += 1

    visit_Raise = visit_Break = visit_Continue = visit_Return

    def skip(self, node: ast.AST) -> None:
        """Skip a definition inside of the function: it runs elsewhere."""

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = visit_Lambda = skip
    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = skip
