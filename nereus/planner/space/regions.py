"""Kinds of block by number: a table of (type, spans nodes) with two rows for each type, the stricter first.

    number   type   spans nodes
    0        0      no             inside one node, of the strongest type
    1        0      yes
    2        1      no
    ...

Types are numbered as a line meets them, strongest first: a larger number is a slower type. `Line.regions` has what
each kind means on a line; everything else asks the columns here.
"""

import numpy as np

from nereus.planner.space.arrays import Ints

KINDS_OF_A_TYPE = 2


def type_of(region: Ints) -> Ints:
    """[...]: number of the slowest type in blocks of some kinds."""
    return region // KINDS_OF_A_TYPE


def spans_nodes(region: Ints) -> Ints:
    """[...]: 0 where blocks of some kinds lie in one node, else 1."""
    return region % KINDS_OF_A_TYPE


def stricter(a: int, b: int) -> int:
    """Of two kinds of one type the one that lies in a node, where either does."""
    assert type_of(np.array(a)) == type_of(np.array(b)), f"regions {a} and {b} are of two types"
    return min(a, b)
