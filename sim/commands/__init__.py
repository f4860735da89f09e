"""One module a command group: what `sim NAME` takes and whom it calls."""
