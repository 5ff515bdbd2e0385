"""What every family of formats shares on a GPU: plans, work lists, the ring, merging, compiling and launching."""
