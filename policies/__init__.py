"""Scheduling policies, one file a family; POLICIES is the table of them all."""
