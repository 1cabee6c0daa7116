"""What a configuration needs: FLOPs, memory, time, cost, disk. Arithmetic only: nothing is measured or started."""
