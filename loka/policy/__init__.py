"""The policy language: schema, loading with positions, matching, the cascade.

`load.load_policy` reads a policy, `cascade.resolve_settings` applies it to the sites of a model, `schema.json_schema`
describes it to editors. Nothing is imported here: `settings` alone must cost neither pydantic nor PyYAML.
"""
