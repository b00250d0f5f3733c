"""A hook whose gradients are infinite in some steps."""

POISON = """
from forge_trainer.hooks import Hook, HookConfig, hooks

@hooks.register("poison")
class PoisonConfig(HookConfig):
    first: int = 3
    last: int
    module: str = "layers.0"
    heals: bool = False  # after a rollback

    def build(self, run):
        incidents = run.directory / "incidents.jsonl"
        def spoil(gradient):
            bad = self.first <= run.progress.step + 1 <= self.last
            if bad and self.heals and incidents.exists():
                bad = '"rollback"' not in incidents.read_text()
            return gradient * float("inf") if bad else gradient
        def watch(module, inputs, output):
            if output.requires_grad:
                output.register_hook(spoil)
        run.parts[0].get_submodule(self.module).register_forward_hook(watch)
        return Hook()
"""
