"""Go's templates (text/template) as far as prompts need them: parsed, and executed within limits of work."""
