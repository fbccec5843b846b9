"""What a growing run says, as values, by the same functions as the report."""
