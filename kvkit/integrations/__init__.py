"""kvkit's operators in the terms of other frameworks; a framework is imported with its module only."""
