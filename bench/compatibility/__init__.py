"""What works with which feature of PyTorch: ``python -m bench.compatibility``.

Rows are checks, columns are modules. A check compares values and gradients with the plain loop in
float64, so that a row says more than that nothing was raised. ``rows`` has the list of rows and
runs one of them, ``subjects`` has the columns and ``own_cell`` that of users' cells, ``trial`` is
what a check works on, ``document`` writes docs/compatibility.md, and other modules hold checks.
"""
