"""Rows of data that are read when they are needed: arrays on disk, Parquet, and iterables of batches."""
