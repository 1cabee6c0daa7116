"""Views of the journal, which may be down: mirrors (MLflow and others), Prefect, messages; the servers of `hlatctl ui`.

``mirrors`` copies a run to MLflow and other services; ``follower`` starts the copying processes alongside a flow.
``prefect_api`` finds or starts an API, ``prefect_flow`` and ``prefect_sweep`` report to it, and ``prefect_stale`` marks
flow runs whose process has died. ``notify`` sends messages to people. ``ui`` serves the pages of MLflow and Prefect;
``local_server`` authenticates requests.
"""
