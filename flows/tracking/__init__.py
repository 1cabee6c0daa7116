"""MLflow and Prefect: views of the journal that may be down, and the servers of `hlatctl ui`.

``mlflow_sync`` copies a run, ``mlflow_sweep`` a sweep, and ``follower`` starts either beside a flow. ``prefect_api``
finds or starts an API, ``prefect_flow`` and ``prefect_sweep`` report to it, ``prefect_stale`` marks flow runs whose
process has died. ``ui`` serves both pages; ``local_server`` says who gets an answer.
"""
