"""The commands of `sim`, one module each: options, help texts and printed output.

Each command imports its libraries when it runs. Only cli imports this package.
"""
