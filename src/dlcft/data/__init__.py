"""What users hand in, brought to one form."""
