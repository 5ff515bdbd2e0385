"""Parts that all families of formats share on a GPU: plans, work lists, the ring, merging, compiling and launching."""
