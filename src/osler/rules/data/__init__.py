"""Data: rows lost, unmixed, or shared between training and validation."""
