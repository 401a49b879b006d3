"""The policy language: schema, loading with positions, matching, the cascade.

`load.read_policy` reads a policy, `cascade.resolve_settings` applies it to the sites of a model, `schema.json_schema`
describes it to editors. Nothing is imported here: importing `settings` must need neither pydantic nor PyYAML.
"""
