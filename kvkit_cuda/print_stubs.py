"""Write the `.pyi` files of this package from the signatures of `kvkit`: python -m kvkit_cuda.print_stubs

A test compares the files with the output.
"""

import ast
import functools
import importlib
import inspect
import textwrap
import types
import typing
from collections import defaultdict
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

MODULES = "kvkit_cuda", "kvkit_cuda.ascend", "kvkit_cuda.dynamic_batching"
HEADING = '"""Printed by `python -m kvkit_cuda.print_stubs`."""\n# fmt: off\n'
COLUMNS = 106  # columns of a line, without the indentation of a class
ARRAY = "Array: TypeAlias = Any  # a numpy array, or a device array of any library\n"
LIKE = set(typing.get_args(getattr(ArrayLike, "__value__", ArrayLike)))  # from numpy 2.5 a `type` statement


class Stub:
    """The stub of a module."""

    def __init__(self, module):
        self.module, self.imports = module, defaultdict(set, typing={"Any", "TypeAlias"})
        self.names = "".join([self.name(name, getattr(module, name)) for name in module.__all__])

    def __str__(self):
        public = "".join(f'    "{name}",\n' for name in self.module.__all__)
        lines = {
            name: f"from {name} import {', '.join(sorted(self.imports[name]))}\n" for name in self.imports
        }
        imports = ["", ""]  # from Python and other packages, from kvkit and kvkit_cuda
        for name in sorted(lines):
            imports[name.startswith("kvkit")] += lines[name]
        parts = HEADING, *filter(None, imports), f"__all__ = [\n{public}]\n{ARRAY}", self.names
        return "\n".join(parts).rstrip() + "\n"

    def name(self, name, value):
        """Return the stub of a public name."""
        if isinstance(value, str):
            return f"{name}: str\n\n"
        if isinstance(value, types.ModuleType):
            self.imports[self.module.__name__].add(name)
            return ""
        if value.__module__ != self.module.__name__:
            self.imports[value.__module__].add(name)
            return ""
        if inspect.isfunction(value):
            return self.function(name, value)
        members = inspect.getmembers(value, inspect.isfunction)
        methods = [self.function(*member) for member in members if not member[0].startswith("_")]
        body = "".join(methods).rstrip().replace("\n", "\n    ")
        return f"class {name}:\n    {body}\n\n"

    def function(self, name, function):
        """Return the stub of a function, with the parameter types of its function in kvkit."""
        path = function.__module__.replace("kvkit_cuda", "kvkit"), *function.__qualname__.split(".")
        origin: typing.Any = functools.reduce(getattr, path[1:], importlib.import_module(path[0]))  # type: ignore[arg-type]
        signature, keyword, given = inspect.signature(origin, eval_str=True), False, []
        own = inspect.signature(function).parameters
        for each in (own | dict(signature.parameters)).values():
            if each.kind is each.KEYWORD_ONLY and not keyword:
                keyword = True
                given.append("*")
            given.append(f"{each.name}{self.annotation(each)}")
        kind = signature.return_annotation
        returned = "" if kind is signature.empty else f" -> {self.type(kind)}"
        text = ", ".join(each.replace(" ", "\0") for each in given)  # lines break between parameters
        text = textwrap.fill(text, COLUMNS, initial_indent="    ", subsequent_indent="    ").replace(
            "\0", " "
        )
        return f"def {name}(\n{text}\n){returned}: ...\n"

    def annotation(self, parameter):
        """Return the source text of a parameter's type and default."""
        known, default = parameter.annotation is not parameter.empty, parameter.default
        kind = f": {self.type(parameter.annotation)}" if known else ""
        if default is parameter.empty:
            return kind
        try:
            ast.literal_eval(repr(default))
            value = repr(default).replace("'", '"')
        except (SyntaxError, ValueError):  # no literal
            value = "..."
        space = " " if known else ""
        return f"{kind}{space}={space}{value}"

    def type(self, kind):
        """Return the source text of a type; numpy's array types become `Array`."""
        kind = getattr(typing.get_origin(kind) or kind, "__value__", kind)  # of a `type` statement
        args, origin = typing.get_args(kind), typing.get_origin(kind)
        if origin in (typing.Union, types.UnionType):
            return " | ".join(dict.fromkeys(self.members(args)))
        if isinstance(kind, typing.TypeVar):
            return " | ".join(dict.fromkeys(self.members(kind.__constraints__)))
        if kind in (np.ndarray, typing.Any) or origin is np.ndarray:
            return "Any" if kind is typing.Any else "Array"
        if kind in (None, type(None), ...):
            return "..." if kind is ... else "None"
        if origin is typing.Literal:
            self.imports["typing"].add("Literal")
            return f"Literal[{', '.join(map(repr, args))}]".replace("'", '"')
        if origin:
            return f"{self.type(origin)}[{', '.join(map(self.type, args))}]"
        if kind.__module__ != "builtins" and kind.__name__ not in self.module.__all__:
            self.imports[kind.__module__].add(kind.__name__)
        return kind.__name__

    def members(self, kinds):
        """Yield the source texts of a union's types; members of `ArrayLike` become one `Array`."""
        if set(kinds) >= LIKE:
            yield "Array"
            kinds = [kind for kind in kinds if kind not in LIKE]
        yield from map(self.type, kinds)


def stubs():
    """Return the stubs of all modules, by their files."""
    modules = map(importlib.import_module, MODULES)
    return {Path(str(module.__file__)).with_suffix(".pyi"): str(Stub(module)) for module in modules}


if __name__ == "__main__":
    for path, stub in stubs().items():
        path.write_text(stub)
