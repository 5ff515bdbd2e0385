// What merge.cpp and a tier's rows have in common.
#pragma once

// Parts of a call at most.
constexpr int MAX_MERGED = 64;
