"""What the plugins of several engines need; imports none of them.

served         which formats are stored token by token, and what of a model they refuse; without torch
options        raw copies of the newest and first pages, and a calibration: what users may say of them
rings          which request has raw copies
calibrated     what layers take whose keys are stored in a calibrated basis
call           what layers have in common that are attended together; joining their results
step           once per step: pages that open, tokens that are also kept raw, which rows decode
layer          once per layer: store the step's tokens, attend
decode         rows that decode: a plan of fixed size over packed pages
prefill        rows of many tokens on a GPU: history unpacked for the engine's FlashAttention
host_prefill   rows of many tokens on a CPU: history read packed, their own tokens as they came
"""
