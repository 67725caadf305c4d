"""The configuration: types, ranges, rules, help. Read `schema` first, then `validation`, `modes` and `construct`."""
