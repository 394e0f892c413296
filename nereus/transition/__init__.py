"""How one plan becomes another: diff, primitives, DAG, feasibility (pure), executor."""
