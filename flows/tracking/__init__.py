"""MLflow and Prefect, which are views of the journal and may be down, and the servers of `hlatctl ui`.

``mlflow_sync`` copies a run, ``mlflow_sweep`` a sweep, and ``follower`` starts either beside a flow. ``prefect_api``
finds or starts an API, ``prefect_flow`` and ``prefect_sweep`` report to it, and ``prefect_stale`` marks flow runs whose
process has died. ``ui`` serves the pages of both; ``local_server`` authenticates requests.
"""
