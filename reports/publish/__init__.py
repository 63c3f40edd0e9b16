"""Posts what is rendered on GitHub: the one comment of a pull request, a check run, and the summary of a job.

Nothing here judges. A post that fails raises PublishError; what that is worth is its caller's to say: never a verdict.
"""
