"""What the plugins of several engines need; imports none of them.

served         which formats are stored token by token, and what of a model they refuse; without torch
call           what layers have in common that are attended together; joining their results
decode         rows that decode: a plan of fixed size over packed pages
host_prefill   rows of many tokens on a CPU: history read packed, their own tokens as they came
"""
