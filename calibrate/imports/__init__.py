"""Profiles imported from step costs that other projects measured."""
