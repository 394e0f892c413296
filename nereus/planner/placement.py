"""Who may share devices: the user's word for how model-stages are placed."""

import enum


class Placement(enum.StrEnum):
    """Who may share devices.

    colocated: all blocks begin at one device, the first at which all can, and every model-stage runs in turn.
    disjoint: model-stages of different roles share no device.
    free: model-stages of one stage share no device; those of different stages may.
    """

    COLOCATED = "colocated"
    DISJOINT = "disjoint"
    FREE = "free"
