"""Parts that the plugins of several engines need. This package imports no engine.

served         which formats are stored token by token, and what of a model they refuse; without torch
options        copies of the newest and first pages, and a calibration: what users may say of them
rings          which request has copies
calibrated     what layers take whose keys are stored in a calibrated basis
call           what layers have in common that are attended together; joining their results
turns          how far keys turn from a page to the next
announce       a line of the engine's log and a metric: what its cache holds and costs
flash          the engine's own FlashAttention, for prompts on GPUs
step           once per step: pages that open, tokens that are also kept in copies, which rows decode
layer          once per layer: store the step's tokens, attend
decode         rows that decode: a plan of fixed size over packed pages
prefill        rows of many tokens: their history and their own tokens as they came
place          once per step: pages before those that open, which tokens are also kept in copies, what rows read
"""
