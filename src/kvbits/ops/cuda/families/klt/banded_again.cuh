// Lets the headers that read pages of one format be included once more, in a namespace of another format.
#undef VALUE_RINGS_CUH
#undef PACKED_CODES_CUH
#undef PACKED_VALUES_CUH
#undef PACKED_WALK_CUH
#undef PACKED_RAW_CUH
#undef PACKED_ATTEND_CUH
#undef BANDED_RINGS_CUH
#undef BANDED_QUERIES_CUH
#undef BANDED_KEYS_CUH
#undef BANDED_WALK_CUH
