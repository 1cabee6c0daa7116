"""What a configuration will take: parameters, FLOPs, memory, disk. Arithmetic only: nothing is measured or started."""
