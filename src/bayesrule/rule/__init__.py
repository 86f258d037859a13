"""The update, written once: measure, form, guard, keep."""
