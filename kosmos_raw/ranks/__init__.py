"""Who runs: processes spawned here, processes of mpirun, or threads; and the communicator that each rank gets."""
