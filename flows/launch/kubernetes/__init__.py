"""Jobs on a Kubernetes cluster: each is an Indexed Job of ``batch/v1`` with a headless Service and one pod per node."""
