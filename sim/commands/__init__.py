"""The commands of `sim`, one module each: their options and what they print.

They import everything below, when they run. Only cli imports them: the library never does.
"""
