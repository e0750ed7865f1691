"""A walk on a grid without walls: the goal lies so many steps to the east and so many to the
north."""

MOVES = {"E": (-1, 0), "W": (1, 0), "N": (0, -1), "S": (0, 1)}
"""What a step does to the way that is left."""


def shown(east: int, north: int) -> str:
    """``+2-1:``: two steps east, one south."""
    return f"{east:+d}{north:+d}:"


class GridWalk:
    """Each step is paid by whether it leads nearer, arriving by 1."""

    def reset(self, east: int, north: int) -> None:
        self.east = east
        self.north = north

    def step(self, action: str) -> tuple[str, float, bool]:
        if action not in MOVES:
            return "", -0.5, True
        before = abs(self.east) + abs(self.north)
        self.east += MOVES[action][0]
        self.north += MOVES[action][1]
        left = abs(self.east) + abs(self.north)
        arrived = left == 0
        return shown(self.east, self.north), 0.1 * (before - left) + arrived, arrived
