"""How findings speak of places, shares and sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

TIMES = "\N{MULTIPLICATION SIGN}"
_MOST_PLACES = 3
_MOST_OF_IT = 0.8


def place(module: str, source: str) -> str:
    """A module and the user's line, as far as they are known.

    >>> place("decoder.mid", "nets.py:7"), place("", "nets.py:7"), place("", "")
    ('decoder.mid (nets.py:7)', 'nets.py:7', 'outside any module')
    """
    if module and source:
        return f"{module} ({source})"
    return module or source or "outside any module"


def starred(module: str) -> str:
    """A module's path with stars for the numbers of layers.

    >>> starred("h.0.attn")
    'h.*.attn'
    """
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


def layers(modules: Iterable[str]) -> str:
    """Modules in a few words: the numbers of repeated layers become stars.

    >>> layers(["h.0.attn", "h.1.attn"]), layers(["mid.attn.0"]), layers(["a", "b", "c", "d"])
    ('h.*.attn', 'mid.attn.0', 'a, b, c and 1 more')
    """
    groups: dict[str, set[str]] = {}
    for module in modules:
        groups.setdefault(starred(module), set()).add(module)
    names = [stars if len(members) > 1 else next(iter(members)) for stars, members in groups.items()]
    names = [name for name in names if name]
    rest = len(names) - _MOST_PLACES
    return ", ".join(names[:_MOST_PLACES]) + (f" and {rest} more" if rest > 0 else "")


def where_most_is(sizes: Mapping[str, int]) -> str:
    """The innermost module that holds most of some bytes by module; '' when they are spread over the step.

    >>> where_most_is({"net.decoder.0": 60, "net.decoder.1": 30, "net.encoder": 10}), where_most_is({"a": 1, "b": 1})
    ('net.decoder', '')
    """
    found: list[str] = []
    while True:
        inner: Counter[str] = Counter()
        for module, size in sizes.items():
            parts = module.split(".") if module else []
            if len(parts) > len(found) and parts[: len(found)] == found:
                inner[parts[len(found)]] += size
        if not inner or inner.most_common(1)[0][1] < _MOST_OF_IT * sum(sizes.values()):
            return ".".join(found)
        found.append(inner.most_common(1)[0][0])


def is_under(module: str, path: str) -> bool:
    """Whether a module is another one or inside it; everything is inside ''.

    >>> is_under("decoder.mid", "decoder"), is_under("decoder2", "decoder"), is_under("decoder", "")
    (True, False, True)
    """
    return not path or module == path or module.startswith(f"{path}.")


def share(part: int, whole: int) -> str:
    """A part of the whole.

    >>> share(1, 4), share(1, 1000)
    ('25 %', '0.1 %')
    """
    percent = 100 * part / whole if whole else 0.0
    return f"{percent:.0f} %" if percent >= 1 else f"{percent:.1f} %"


def sizes(shape: Iterable[int]) -> str:
    """A shape as people write it.

    >>> sizes((4, 512)) == f"4{TIMES}512"
    True
    """
    return TIMES.join(str(size) for size in shape) or "1"


def counted(count: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "worker"), counted(12, "map")
    ('1 worker', '12 maps')
    """
    return f"{count} {noun}{'s' * (count != 1)}"
