// The rotary embedding's angles.
#pragma once
#include "ptx.cuh"

/// (cos, sin) of position * inv_freq, `turns` from side.py: the angle's whole turns are dropped before anything is
/// rounded.
DEVICE float2 turn_of(int position, float2 turns) {
    float p = float(position), whole = p * turns.x, rest = fmaf(p, turns.x, -whole) + p * turns.y;
    float angle = ((whole - rintf(whole)) + rest) * 6.283185307179586f;
    return {cos_approx(angle), sin_approx(angle)};
}
