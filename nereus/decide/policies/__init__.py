"""The rules that a recipe can choose by `admission`."""

from collections.abc import Callable, Mapping
from typing import Final, Literal

from nereus.decide.policies.nereus import NereusPolicy
from nereus.decide.policies.paper import PaperPolicy
from nereus.decide.policy import Dials, Policy

POLICIES: Final[Mapping[Literal["nereus", "paper"], Callable[[Dials], Policy]]] = {
    "nereus": NereusPolicy,
    "paper": PaperPolicy,
}
