"""An unconditional diffusion model: a U-Net of diffusers' learns the noise, with a moving average."""

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel


def main(batch=2, resolution=32):
    model = UNet2DModel(
        sample_size=resolution, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(32, 32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"), norm_num_groups=8,
    )  # fmt: skip
    model.to("cuda")
    ema_model = EMAModel(model.parameters(), decay=0.9999, model_cls=UNet2DModel, model_config=model.config)
    noise_scheduler = DDPMScheduler(num_train_timesteps=1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    lr_scheduler = get_cosine_schedule_with_warmup(optimizer, 500, 10000)
    clean_images = torch.randn(batch, 3, resolution, resolution).cuda()

    def step():
        noise = torch.randn(clean_images.shape, device=clean_images.device)
        timesteps = torch.randint(0, noise_scheduler.config.num_train_timesteps, (batch,), device="cuda").long()
        noisy_images = noise_scheduler.add_noise(clean_images, noise, timesteps)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            model_output = model(noisy_images, timesteps).sample
            loss = F.mse_loss(model_output.float(), noise.float())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        ema_model.step(model.parameters())
        print({"loss": loss.detach().item(), "lr": lr_scheduler.get_last_lr()[0]})

    return step
